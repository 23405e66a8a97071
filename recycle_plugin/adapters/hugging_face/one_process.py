"""Work that a script has one process do for all, such as writing a file. A loss may change which process that is. A
process that repeats past steps (passing.py) does none of this work, if the script decides by Accelerate. For files that
it writes otherwise a warning is sent.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.state import PartialState

from recycle_plugin.adapters.hugging_face.operations import wrap, wrap_method
from recycle_plugin.runtime.collectives.callers import calling_line
from recycle_plugin.runtime.control.script import ScriptHooks
from recycle_plugin.runtime.control.session import Session

DECORATORS = ("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process")
PROPERTIES = ("is_main_process", "is_local_main_process", "is_last_process")
WRITES = os.O_WRONLY | os.O_RDWR


def install(session: Session) -> None:
    """Make Accelerate's decorators and properties follow the script's position, and a newcomer report files that it
    writes.
    """
    for name in DECORATORS:
        wrap_method(PartialState, name, functools.partial(_when_called, session.hooks))
    if session.view.newcomer:
        for of in (PartialState, Accelerator):
            for name in PROPERTIES:
                setattr(of, name, _outside(session.hooks, getattr(of, name)))
        writes = Writes(session)
        wrap(torch, "save", writes.save)
        sys.addaudithook(writes.hear)


def _when_called(
    hooks: ScriptHooks,
    stock: Callable[..., Any],
    of: Any,
    function: Callable[..., Any] | None = None,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Decorate ``function``. Stock decides once, when it decorates, whether this process runs it."""
    if function is None:
        return stock(of, function, *arguments, **named)

    @functools.wraps(function)
    def called(*given: Any, **more: Any) -> Any:
        return None if hooks.passes else stock(of, function, *arguments, **named)(*given, **more)

    return called


def _outside(hooks: ScriptHooks, stock: property) -> property:
    """Return the property, which is false in steps that are over."""
    return property(lambda of: not hooks.passes and stock.__get__(of))


class Writes:
    """The files that a script writes in past steps. Only the first one is reported."""

    def __init__(self, session: Session) -> None:
        self._session, self._said = session, False

    def save(self, stock: Callable[..., Any], obj: object, f: Any, *arguments: Any, **named: Any) -> None:
        """Save with torch.save, and report the file here: torch's file writer raises no audit event."""
        if isinstance(f, (str, os.PathLike)):
            self._say(f)
        stock(obj, f, *arguments, **named)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Hear of an event of sys.audit. New files under names of their own are no harm, and devices are none."""
        if event == "open" and self._session.hooks.passes and threading.current_thread() is threading.main_thread():
            path, _, flags = arguments
            if isinstance(path, (str, bytes, os.PathLike)) and flags & WRITES and not flags & os.O_EXCL:
                self._say(path)

    def _say(self, path: Any) -> None:
        passes = self._session.hooks.passes and not self._session.forked  # forks, as those of loaders, can't say it
        if self._said or not passes or (os.path.exists(path) and not os.path.isfile(path)):
            return
        self._said = True
        self._session.note(
            "warning",
            f"rank {self._session.rank}, which has come back, writes {os.fsdecode(path)} at {calling_line()}, in a "
            "step that was over before, and may overwrite others' files: if one process writes for all, let it "
            "ask accelerator.is_main_process, or decorate it by accelerator.on_process(…)",
        )
