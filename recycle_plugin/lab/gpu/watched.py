"""Watch a worker's thread on its CUDA device while it trains: races, and calls that wait for the device.

torch.cuda._sanitizer raises if two streams use the same memory without an order. torch's debug mode for
synchronisations can only refuse or warn; here it warns, and each warning is counted by its place.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

OF_THE_JOB = re.compile(r"recycle_plugin/(checks|lab)/")  # which may wait for the device
SYNCHRONISES = "called a synchronizing"
ALLOWED = {
    "recycle_plugin/runtime/devices/accelerator.py:_from": "a copy for which there is no pinned room left",
    "recycle_plugin/runtime/devices/accelerator.py:_to": "a copy for which there is no pinned room left",
}
"""{place in the package that may wait for the device: why}"""


class Watched:
    """A context in which races on the device raise, and ``found`` counts waits for the device by their place. Places in
    ALLOWED are not counted. On devices other than CUDA ``on`` is False and ``found`` stays empty.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.on = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> Watched:
        self._warnings.__enter__()
        warnings.filterwarnings("always", message=SYNCHRONISES)
        self._shown, warnings.showwarning = warnings.showwarning, self._take
        if self.on:
            from torch.cuda import _sanitizer

            _sanitizer.enable_cuda_sanitizer()
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)

    def _take(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        if SYNCHRONISES not in str(message):
            self._shown(message, *rest, **more)
        elif (place := _place()) not in ALLOWED:
            self.found[place] += 1


def _place() -> str:
    """Return ``file:function`` of the innermost caller in the package, or else of the calling script."""
    frames = [
        frame for frame in traceback.extract_stack() if not frame.filename.endswith(("warnings.py", "watched.py"))
    ]
    own = [frame for frame in frames if "recycle_plugin/" in frame.filename and not OF_THE_JOB.search(frame.filename)]
    frame = (own or frames)[-1]
    return f"{frame.filename[frame.filename.rfind('recycle_plugin/') :] if own else frame.filename}:{frame.name}"
