"""Jobs of tests/jobs/from_the_top.py."""

from __future__ import annotations

SCRIPT = "tests/jobs/from_the_top.py"
NOTHING_ELSE = {
    "load": "",
    "config": {},
    "tied": False,
    "steps": 8,
    "epochs": 4,
    "held": 0,
    "drawn": 0,
    "source": False,
    "does": "",
    "dies_giving": -1,
}
STEPS, HELD = 60, 12
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "recycle": {"zero": "replicate"}}
