"""scripts/train_gpt.py with something changed from outside: RECYCLE_TEST_WRAP holds {"name": …, other arguments …}, or
a list of these, as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import deepspeed_wrappers
import wrappers

wraps = json.loads(os.environ["RECYCLE_TEST_WRAP"])
for arguments in wraps if isinstance(wraps, list) else [wraps]:
    name = arguments.pop("name")
    (getattr(wrappers, name, None) or getattr(deepspeed_wrappers, name))(**arguments)
runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train_gpt.py"), run_name="__main__")
