"""The figures' scripts as modules, as they see themselves when started."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "reproduce"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """``script(name, *overrides)``: the module, with these arguments on its command line."""

    def load(name: str, *overrides: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(SCRIPTS))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *overrides])
        return importlib.import_module(name)

    return load
