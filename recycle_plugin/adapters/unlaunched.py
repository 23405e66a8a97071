"""A line for whoever switches the plugin on, in a DeepSpeed config or by RECYCLE_CONFIG for Megatron-LM, and starts the
job without it.

The package is an entry point of the group ``torch.backends``, which torch calls when it is imported.  Nothing else of
the plugin runs in a job that ``deepspeed train.py`` or torchrun has started: it is stock's, and the loss of a worker
ends it.  Imports nothing but the standard library, since every process that imports torch pays for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

LAUNCHED = "RECYCLE_COORDINATOR"  # in the environment of the plugin's workers
CONFIG = "RECYCLE_CONFIG"  # the path of the settings of a Megatron-LM job
WARNING = (
    "recycle: warning: recycle.enabled is true, and this job was started without the plugin: the loss of a worker ends "
    "it. Start it as: "
)
SAID = WARNING + "deepspeed --module recycle_plugin.launch YOUR_SCRIPT.py ..."
MEGATRON_SAID = (
    WARNING
    + "python -m recycle_plugin.launch --workers N pretrain_gpt.py ..., or torchrun -m recycle_plugin.launch ..."
)


def watch() -> None:
    """Have DeepSpeed's config, and Megatron-LM's training loop, say so once they are imported, in whichever order."""
    if LAUNCHED not in os.environ:
        AfterImport({"deepspeed.runtime.config": _wrap, "megatron.training.training": _warn_megatron}).install()


def _warn_megatron(module: ModuleType) -> None:
    if (path := os.environ.get(CONFIG)) and os.environ.get("RANK", "0") == "0" and _enables(path):
        print(MEGATRON_SAID, file=sys.stderr, flush=True)


def _enables(path: str) -> bool:
    """Whether the section in the file ``path`` switches the plugin on."""
    import json  # in few processes

    try:
        with open(path) as file:
            section = json.load(file)
        return bool(section.get("recycle", section)["enabled"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False


def _wrap(module: ModuleType) -> None:
    config = getattr(module, "DeepSpeedConfig", None)
    if config is None:
        return
    stock = config.__init__

    @functools.wraps(stock)
    def read(self: Any, *arguments: Any, **named: Any) -> None:
        stock(self, *arguments, **named)
        section = getattr(self, "_param_dict", {}).get("recycle")
        enabled = isinstance(section, dict) and section.get("enabled") is True
        if enabled and LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0":
            print(SAID, file=sys.stderr, flush=True)

    config.__init__ = read


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``wrap(module)`` right after each named module has been imported for the first time."""

    def __init__(self, wrappers: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wrappers = dict(wrappers)

    def install(self) -> None:
        """Wrap the modules that are imported already, and wait for the others."""
        for name in [name for name in self._wrappers if name in sys.modules]:  # a warm process has them already
            self._wrappers.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Python's import calls this: for a named module, have it wrapped once it is loaded.  Others call it too, who
        only ask whether there is such a module.
        """
        if name not in self._wrappers:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]  # among which may be another one of these
        found = (each.find_spec(name, path, target) for each in others if hasattr(each, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            if (wrap := self._wrappers.pop(name, None)) is not None:
                wrap(module)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec
