"""Warn if the settings switch the plugin on, and the job was started without its launcher.

The settings are the section of a DeepSpeed config, or the file in RECYCLE_CONFIG for Megatron-LM. This module is an
entry point of the group ``torch.backends``, which torch calls when it is imported. A job started by ``deepspeed
train.py`` or torchrun runs no other code of the plugin, and the loss of a worker ends it. Only the standard library is
imported, since every process that imports torch pays for it.
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
    """Have DeepSpeed's config and Megatron-LM's training loop print the warning once they are imported."""
    if LAUNCHED not in os.environ:
        AfterImport({"deepspeed.runtime.config": _wrap, "megatron.training.training": _warn_megatron}).install()


def _warn_megatron(module: ModuleType) -> None:
    if (path := os.environ.get(CONFIG)) and os.environ.get("RANK", "0") == "0" and _enables(path):
        print(MEGATRON_SAID, file=sys.stderr, flush=True)


def _enables(path: str) -> bool:
    """Whether the settings in the JSON file ``path`` switch the plugin on."""
    import json  # few processes need it

    try:
        with open(path) as file:
            section = json.load(file)
        return bool(section.get("recycle", section)["enabled"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
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
    """An import hook that calls ``wrap(module)`` right after the first import of each named module."""

    def __init__(self, wrappers: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wrappers = dict(wrappers)

    def install(self) -> None:
        """Wrap the named modules that are already imported, and wait for the others."""
        for name in [name for name in self._wrappers if name in sys.modules]:  # a forked worker has them
            self._wrappers.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec whose loader also wraps the module. Not at once: callers may only look for the module."""
        if name not in self._wrappers:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]  # possibly other hooks of this class
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
