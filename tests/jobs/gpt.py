"""scripts/train_gpt.py with something changed from outside: RECYCLE_TEST_WRAP holds {"name": …, other arguments …} as JSON."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import wrappers

arguments = json.loads(os.environ["RECYCLE_TEST_WRAP"])
getattr(wrappers, arguments.pop("name"))(**arguments)
runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train_gpt.py"), run_name="__main__")
