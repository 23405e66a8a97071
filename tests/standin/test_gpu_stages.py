"""Stages of ``scripts/on_gpu`` that measure one process, on the device: their code and its order, not their figures."""

from __future__ import annotations

import os

import pytest
import torch

from recycle_plugin.lab.gpu import gpu_figures
from recycle_plugin.lab.gpu.place import StagePlace

STAGES = {
    "split": {"gpt_tiny", "gpt_tiny, checkpointing"},
    "undo": {"undo: snapshot", "undo: host_snapshot", "undo: inverse"},
    "copies": {"copies"},
    "rng": {"keyed forwards"},
}


@pytest.mark.parametrize("stage", STAGES)
def test_it_runs_in_order(standin, tmp_path, stage):
    os.environ.pop("DS_ACCELERATOR", None)
    torch.set_num_threads(1)
    standin.configure(late=5)
    place = StagePlace(standin.NAME, tmp_path, tmp_path / stage, rehearsal=True)
    place.folder.mkdir()
    rows = getattr(gpu_figures, stage)(place)
    assert {row.name for row in rows} == STAGES[stage]
    assert all(row.passed is not False for row in rows), rows
    assert all(value >= 0 for row in rows for value in row.figures.values()), rows
