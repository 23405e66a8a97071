"""Run a script on the stand-in accelerator if RECYCLE_TEST_ON_STANDIN says so: on_standin.py SCRIPT [its arguments].

DeepSpeed is told of it but for the job that does without.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

WITHOUT_DEEPSPEED = ("small_job.py", "watched_job.py")

if __name__ == "__main__":
    del sys.argv[0]
    script = Path(sys.argv[0])
    sys.path[:0] = [str(script.parent), str(Path(__file__).parents[2])]
    if os.environ.get("RECYCLE_TEST_ON_STANDIN"):
        os.environ.pop("DS_ACCELERATOR", None)
        importlib.import_module("tests.support.standin")
        if script.name not in WITHOUT_DEEPSPEED:
            importlib.import_module("tests.support.standin.accelerator").use()
    runpy.run_path(str(script), run_name="__main__")
