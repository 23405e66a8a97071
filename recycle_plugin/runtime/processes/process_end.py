"""The end of a worker's process: it waits for the script's threads and exit functions, not for the plugin's threads."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import Any


def leave_process(code: int) -> None:
    """End this process without waiting for the plugin's threads that are left behind in broken operations. With code 0,
    the script's own threads and pools end first, as under Python: an upload may be under way.
    """
    if code == 0:
        interpreter: Any = threading  # its stubs lack what Python calls at its end
        interpreter._shutdown()
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def flush() -> None:
    """Flush standard output and error as far as possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # on a full disk; closed by the script, or none
            stream.flush()
