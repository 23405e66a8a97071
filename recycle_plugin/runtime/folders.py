"""Folders that stand under their name whole or not at all, whoever dies while they are written."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def put_in_place(made: Path, final: Path) -> None:
    """``made``, whose files are complete, gets the name ``final`` in one step; what stood there before has the other's name then.

    On file systems that can't exchange two names there is a moment at which nothing is called ``final``.
    """
    sync(made)
    if not final.exists():
        made.rename(final)
    elif not _exchange(made, final):
        aside = made.with_name(f"{made.name}-replaced")
        final.rename(aside)
        made.rename(final)
        aside.rename(made)
    sync(final.parent)


def write_whole(path: Path, text: str) -> None:
    """``path`` holds ``text``, or still what it held before."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def remove(folder: Path) -> None:
    """What others may be removing too, or be writing to for the last time."""
    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """What ``path``, a file or a folder, holds is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Whether the two now have each other's name."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return exchange is not None and exchange(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
