"""The public methods and properties of DeepSpeed's engine, and of its optimizer, beside stock's: its value, or refused
by name, fault-free and after a loss; generated from the classes.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.cluster import Result

SCRIPT = "tests/jobs/surface.py"
STEPS = 3
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.01,
    "steps_per_print": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}


def ran(launch, folder, more: dict[str, Any], recycle: dict[str, Any], replica: bool = False) -> Result:
    section = {"run_dir": str(folder), "report": False, **recycle}
    job = {"folder": str(folder), "config": {**BASE, **more, "recycle": section}, "steps": STEPS, "replica": replica}
    return launch(script=SCRIPT, RECYCLE_TEST_SURFACE=json.dumps(job)).finish()


@pytest.mark.parametrize("more", ({}, BF16), ids=("fp32", "bf16"))
def test_explore(launch, tmp_path, more):
    stock = ran(launch, tmp_path / "run0", more, {"enabled": False})
    print(stock.output[-3000:])
    ours = ran(launch, tmp_path / "run1", more, {"enabled": True})
    print(ours.output[-3000:])
    for rank in ours.records:
        a, b = stock.records[rank], ours.records[rank]
        print(rank, "UNKNOWN", b["unknown"])
        for name in a["surface"]:
            if a["surface"][name] != b["surface"].get(name):
                print(
                    "DIFF",
                    name,
                    "\n    STOCK",
                    a["surface"][name][:300],
                    "\n    OURS ",
                    b["surface"].get(name, "")[:300],
                )
        if rank == 0:
            continue
        break
    assert 0
