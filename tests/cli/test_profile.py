"""``recycle profile`` on the CPU: a tiny GPT's costs, which ``recycle plan`` then takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary import profile


def measured(path: Path, *more: str) -> profile.Profile:
    assert main(["profile", "--repeat", "1", "--device", "cpu", "--out", str(path), *more]) == 0
    return profile.read(path)


def test_profile_of_a_tiny_gpt(capsys, tmp_path: Path) -> None:
    taken = measured(tmp_path / "tiny.json")
    said = capsys.readouterr().out
    assert taken.origin == "measured" and "MEASURED" in said and "not measured" in said
    assert (taken.dtype, taken.layers, taken.boundary_bytes) == ("fp32", 4, 4 * 64 * 128)
    assert 0 < taken.device_bytes <= psutil.virtual_memory().total and "workers of one host share it" in said
    for part in (taken.first, taken.layer, taken.last):
        assert min(part.forward_us, part.input_us, part.weight_us, part.backward_us, part.step_us) > 0
        assert part.parameters and part.activation_bytes and part.pending_bytes
    job = f"plan --profile {tmp_path / 'tiny.json'} --pp 2 --dp 2 --micro-batches 4 --lost 1.1 --json"
    assert main(job.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == "us" and "MEASURED" in found["costs"] and found["period"] >= found["lower_bound"]


def test_checkpointing_holds_the_input_only(tmp_path: Path) -> None:
    whole, saved = measured(tmp_path / "a.json"), measured(tmp_path / "b.json", "--checkpointing")
    assert saved.checkpointing and saved.layer.activation_bytes == saved.boundary_bytes < whole.layer.activation_bytes
    assert saved.layer.pending_bytes == whole.layer.pending_bytes > saved.layer.activation_bytes


def test_bf16_halves_the_boundary(tmp_path: Path) -> None:
    taken = measured(tmp_path / "x.json", "--dtype", "bf16")
    assert taken.boundary_bytes == 2 * 64 * 128 and taken.gradient_bytes_each == 2


@pytest.mark.parametrize(
    "more, says",
    [
        ("--repeat 0", "at least 1"),
        ("--model emulated", "not a GPT"),
        ("--model gpt9", "gpt9"),
        ("--out /no/such/x.json", "no folder"),
    ],
)
def test_errors_are_one_line(capsys, more: str, says: str) -> None:
    assert main(["profile", *more.split()]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("recycle: ") and said.count("\n") == 1
