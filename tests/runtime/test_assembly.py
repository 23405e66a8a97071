"""What would hold up a recovery is done before the first step: all wait for the survivor that does it then."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest

from recycle_plugin.runtime.worker import assembly


class AskedForError(Exception):
    pass


class Parts:
    """A worker's parts, of which none is there yet."""

    def __getattr__(self, name: str) -> Any:
        raise AskedForError


def test_the_planner_is_compiled_and_the_due_collection_made_before_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the collector switched off, the collection is one that was asked for."""
    compiled: list[bool] = []
    monkeypatch.setattr(assembly.planner, "warm", lambda: compiled.append(True))
    full = lambda: gc.get_stats()[-1]["collections"]
    gc.disable()
    try:
        before = full()
        with pytest.raises(AskedForError):
            assembly.assembled(Parts(), 0, lambda: None, None, nullcontext)
        assert compiled and full() == before + 1
    finally:
        gc.enable()
