"""scripts/train_gpt.py with something changed from outside: RECYCLE_TEST_WRAP, as wrappers.apply has it."""

from __future__ import annotations

import runpy
from pathlib import Path

import deepspeed_wrappers
import wrappers

wrappers.apply(deepspeed_wrappers)
runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train_gpt.py"), run_name="__main__")
