"""The stage "links" of ``scripts/on_gpu``: its code over the false NCCL, and what it says where it can't be tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_plugin.lab.gpu import gpu_links
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.runtime.collectives.nccl_door import LIMIT

WORKER = (str(Path(__file__).parents[1] / "jobs" / "link_worker.py"),)
BOTH = (
    "a sum",
    "abort beside the dead",
    "a new group and its sum",
    "abort of 4 at once",
    "a group whose last member comes late",
)


def test_each_member_has_a_row_for_what_it_has_tried(tmp_path):
    place = StagePlace("standin", tmp_path, tmp_path / "links", rehearsal=True)
    rows = gpu_links.tried(place, WORKER, {LIMIT: "1"})
    assert all(row.passed for row in rows), rows
    expected = {f"{name}, member {rank}" for name in BOTH for rank in (0, 1)}
    assert {row.name for row in rows} == expected | {
        "a sum, member 2",
        "abort of a first call that blocks, member 0",
    }


@pytest.mark.parametrize(
    "release, unfit, said",
    [
        ((2, 28, 9), [], "NCCL 2.28.9 allows one process on a GPU; --nccl FILE loads one from 2.30 on before torch"),
        ((2, 25, 1), ["it hangs"], "it hangs"),
    ],
)
def test_why_it_can_not_be_tried_is_one_line(tmp_path, monkeypatch, release, unfit, said):
    monkeypatch.setattr(gpu_links, "loaded_release", lambda: release)
    monkeypatch.setattr(gpu_links, "unfit", lambda: iter(unfit))
    (row,) = gpu_links.links(StagePlace("cuda", tmp_path, tmp_path / "links", rehearsal=False))
    assert row.passed is None and row.text == f"not tried: {said}"


def test_a_rehearsal_on_a_cpu_says_so(tmp_path):
    (row,) = gpu_links.links(StagePlace("cpu", tmp_path, tmp_path / "links", rehearsal=True))
    assert row.passed is None and row.text == "not tried: there is no NCCL on cpu"
