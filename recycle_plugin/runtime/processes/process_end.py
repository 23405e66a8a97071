"""The end of a worker's process: with what its script has left to do, and without what the plugin has."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import Any


def leave_process(code: int) -> None:
    """End this process, without waiting for the plugin's threads that were left behind in broken operations.

    Where the script has ended well, its own threads and pools of them come to their end before, as with Python: an
    upload that is under way, say.
    """
    if code == 0:
        interpreter: Any = threading  # whose stubs lack what Python calls at its end
        interpreter._shutdown()
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def flush() -> None:
    """Flush standard output and error, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk
            stream.flush()
