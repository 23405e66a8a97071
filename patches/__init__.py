"""Version-gated replacements of functions in DeepSpeed and megatron-core that no hook reaches.

A :class:`Patch` states its target, the versions, and a hash of the replaced source. It refuses if any of these differs,
so an update is noticed here and not in somebody's gradients.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet


class PatchMismatch(RuntimeError):
    """A patch's target is not the code that it was written for; nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """The replacement of one function.

    ``target``: ``package.module:qualified.name`` of a plain function or method; ``package``: the distribution whose
    version must satisfy ``versions``, for instance ``>=0.16,<0.17``; ``source_sha256``: of ``inspect.getsource`` of the
    original; ``replacement``: has the original's signature.
    """

    target: str
    package: str
    versions: str
    source_sha256: str
    replacement: Callable

    def apply(self) -> None:
        """Replace the target; a second call does nothing. Raises :class:`PatchMismatch`."""
        self._check_version()
        owner, name = self._locate()
        if vars(owner)[name] is not self.replacement:
            self._check_source(vars(owner)[name])
            setattr(owner, name, self.replacement)

    def _locate(self) -> tuple[Any, str]:
        """Return the module or class that holds the target, and the target's name in it."""
        module, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        try:
            # import_module, not attributes: the module deepspeed.comm.torch is hidden by an attribute of
            # deepspeed.comm, torch
            owner = importlib.import_module(module)
            for part in outer:
                owner = getattr(owner, part)
            vars(owner)[name]
        except (ImportError, AttributeError, KeyError) as error:
            raise PatchMismatch(
                f"{self.target}: expected in {self.package} {self.versions}, found nothing ({error!r})"
            ) from error
        return owner, name

    def _check_version(self) -> None:
        try:
            found = version(self.package)
        except PackageNotFoundError:
            found = "no such package"
        if found == "no such package" or not SpecifierSet(self.versions).contains(found, prereleases=True):
            raise PatchMismatch(f"{self.target}: expected {self.package} {self.versions}, found {found}")

    def _check_source(self, original: Any) -> None:
        try:
            found = source_sha256(original)
        except (OSError, TypeError) as error:
            found = f"no source ({error})"
        if found != self.source_sha256:
            raise PatchMismatch(
                f"{self.target}: expected source with sha256 {self.source_sha256}, found {found}; "
                f"{self.package} changed it: read the new source, adapt the replacement, record the new hash"
            )


def source_sha256(function: Any) -> str:
    """Return the hash that a patch of ``function`` has to state: 64 hex digits."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
