"""The releases that the plugin is written for. setup.cfg tells pip the same; a test compares the two.

DeepSpeed before 0.19.3 (since 0.18) divides the gradients of all stages but the last by ``gradient_accumulation_steps``
once more at every stage that they pass. Training would then continue with other numbers after switching the plugin on
or off.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

EXTRAS = {"deepspeed": "deepspeed", "megatron": "megatron", "matplotlib": "report"}
"""{module that not all users need: the extra of setup.cfg that installs it}"""

RANGES = {"torch": ">=2.6", "deepspeed": ">=0.19.3,<0.20", "megatron-core": ">=0.16,<0.17"}
HUGGING_FACE = {"transformers": ">=5.24,<6", "accelerate": ">=1.15,<2"}
"""Releases whose loops train sharded replicas; other jobs may have any."""


class Release(NamedTuple):
    """A release that the plugin needs. ``installed``: its version here, or None."""

    name: str
    installed: str | None
    needs: str

    @property
    def fits(self) -> bool:
        return self.installed is None or SpecifierSet(self.needs).contains(self.installed, prereleases=True)

    @property
    def wrong(self) -> str:
        return f"{self.name} {self.installed}: pip install '{self.name}{self.needs}'"


def releases(names: Iterable[str] = RANGES) -> list[Release]:
    """Return the installed releases of ``names`` with the plugin's ranges."""
    return [Release(name, _installed(name), (RANGES | HUGGING_FACE)[name]) for name in names]


def how_to_install(missing: ModuleNotFoundError) -> str:
    """Return the line that says which extra installs the module, "" if none does."""
    name = (missing.name or "").partition(".")[0]
    return f"{name} is not installed: pip install 'recycle_plugin[{EXTRAS[name]}]'" if name in EXTRAS else ""


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
