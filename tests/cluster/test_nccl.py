"""Jobs on the stand-in accelerator whose sums go over the false NCCL (tests/support/standin/nccl.py).

A survivor waits in a kernel for the dead, until an abort ends it with garbage.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mistakes.nccl import IN_SUMS
from tests.support.cluster import Run
from tests.support.jobs import (
    DEEPSPEED,
    LATE,
    PLAIN,
    SQUARE,
    STANDIN,
    WRAPPED,
    assert_in_order,
    assert_same_training,
    difference,
    faults,
    on_deepspeed,
)
from tests.support.kills import CLIPPED, THREE, struck
from tests.support.launching import launching
from tests.support.returns import LONG, assert_came_back, comes_back

OVER = "recycle.device_link=nccl"
KILLS = {
    "before its sum": "kill 1.1 before 1REDUCE@5",
    "behind its sum": "kill 1.1 after 1REDUCE@5",
    "before its step": "kill 2.0 before 0STEP@5",
    "in a forward": "kill 0.0 before 0F0.1@5",
    "in a backward": "kill 2.1 before 1W2.0@6",
}


@pytest.fixture
def vehicle():
    return STANDIN


@pytest.fixture
def on_the_host(request, references):
    return lambda *more: references(request.getfixturevalue("plain_server"), PLAIN, THREE, *more)


@pytest.fixture
def start(launch, tmp_path):
    """``start(*overrides, also=[], mistake="")``: a job over NCCL, changed by more wrappers."""

    def start(*more: str, also: tuple[dict, ...] = (), mistake: str = ""):
        wraps = [{"name": "over_false_nccl", "folder": str(tmp_path), "mistake": mistake}, *also]
        wrapped = {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps(wraps)}
        return launch(OVER, *more, shape=THREE, **wrapped, **LATE).finish()

    return start


def counts(folder: Path, lost: str) -> list[int]:
    """How many kernels of NCCL's each worker that was there all the time has seen through."""
    return [sum(json.loads(path.read_text()).values()) for path in folder.glob("*.json") if path.stem != lost]


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill(start, on_the_host, tmp_path, kill):
    result = start(faults(KILLS[kill]))
    assert_same_training(result, on_the_host(), {KILLS[kill].split()[1]})
    assert struck(result) == {KILLS[kill]}
    assert_in_order(result)
    assert min(counts(tmp_path, KILLS[kill].split()[1])) > 0


@pytest.mark.parametrize("setting", ["recycle.exact=true", CLIPPED])
def test_a_kill_with(start, on_the_host, tmp_path, setting):
    """Exact sums are added in their own order, on the host."""
    result = start(faults(KILLS["before its sum"]), setting)
    assert_same_training(result, on_the_host(setting), {"1.1"})
    assert_in_order(result)
    exact = "exact" in setting
    assert all((count == 0) == exact for count in counts(tmp_path, "1.1"))


@pytest.fixture
def stuck(tmp_path) -> dict:
    """1.1 dies in a sum in which the others of its stage are stuck."""
    dies = {"seat": "1.1", "step": 5, "others": ["0.1", "2.1"]}
    return {"name": "die_beside_stuck_sums", "folder": str(tmp_path), **dies}


def test_garbage_of_an_abort_is_in_no_weight(start, on_the_host, stuck):
    """The thread that trains hears of the loss only when the sum's event has happened."""
    assert_same_training(start(also=(stuck,)), on_the_host(), {"1.1"})


@pytest.mark.parametrize("mistake", ["", *IN_SUMS])
def test_garbage_of_another_members_abort_is_in_no_weight_and_would_be_seen(start, on_the_host, stuck, mistake):
    """It ends the sum of a member that has not heard of the loss yet."""
    result = start(mistake=mistake, also=(stuck | {"last": "2.1"},))
    if not mistake:
        assert_same_training(result, on_the_host(), {"1.1"})
        return
    assert result.code != 0 or not difference(result, on_the_host()).tolerated


def test_a_worker_whose_abort_does_not_end_gives_itself_up(start, on_the_host, stuck):
    result = start("recycle.rejoin=never", also=(stuck, {"name": "never_abort", "seat": "0.1"}))
    assert_same_training(result, on_the_host(), {"0.1", "1.1"})
    assert any("NCCL" in event["text"] and "ranks" in event["text"] for event in result.of("error"))


def test_who_comes_back_adds_up_over_nccl_too(launch, on_the_host, tmp_path):
    """The others leave their groups for ones that it is in."""
    over, seat = {"name": "over_false_nccl", "folder": str(tmp_path)}, "1.1"
    kill = "kill 1.1 before 1REDUCE@5"
    result = comes_back(
        lambda *more, **job: launch(*more, **job, **LATE), tmp_path, kill, OVER, shape=THREE, wraps=(over,)
    )
    result = result.finish()
    assert_came_back(result, on_the_host(f"steps={LONG}"), seat)
    assert_in_order(result)
    assert min(counts(tmp_path, "")) > 0


def test_deepspeed_survives_a_kill(server, tmp_path, references):
    """Whose optimizer has buckets of its own."""
    kill, counted = "kill 0.1 before 1REDUCE@5", {"name": "over_false_nccl", "folder": str(tmp_path)}
    with launching(server, tmp_path, Run, DEEPSPEED) as launch:
        result = launch(faults(kill), OVER, script=WRAPPED, **on_deepspeed(counted), **LATE).finish()
    assert_same_training(result, references(server, DEEPSPEED, SQUARE), {"0.1"})
    assert_in_order(result)
    assert min(counts(tmp_path, "0.1")) > 0
