"""Builds the stand-in's native part, once for each version of its sources and of torch, outside the checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from tests.support.loaded import loaded

HERE = Path(__file__).parent / "standin"
SOURCES = sorted(HERE.glob("*.cpp"))
BUILD_S = 600.0  # how long to wait for another process that builds
NAME = "recycle_standin"
FLAGS = ("-O1", "-g0", "-DNDEBUG", "-Wall", "-Wno-unknown-pragmas")


def native() -> ModuleType:
    """Load the extension, built unless this version of it has been before: from then on torch has the device."""
    return loaded(built(), NAME)


def built() -> Path:
    """Return the extension's file, made unless this version of it has been before."""
    library = _folder() / f"{NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _build(library)
    return library


def can_be_built() -> bool:
    return (_folder() / f"{NAME}.so").exists() or shutil.which(os.environ.get("CXX", "c++")) is not None


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(torch.__version__.encode() + repr(FLAGS).encode())
    for path in (*sorted(HERE.glob("*.h")), *SOURCES):
        digest.update(path.name.encode() + path.read_bytes())
    return Path(cache) / "recycle_plugin" / "standin" / digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + BUILD_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {BUILD_S:g} s for another process to build {path.parent}") from None
                time.sleep(0.1)
        yield


def _build(library: Path) -> None:
    """Compile in a folder of its own: torch's lock there would outlive a builder that is killed."""
    from torch.utils.cpp_extension import load  # slow to import, and needless once it is built

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        load(
            NAME,
            [str(path) for path in SOURCES],
            build_directory=folder,
            extra_cflags=list(FLAGS),
            is_python_module=False,
        )
        shutil.move(Path(folder) / f"{NAME}.so", library)
