"""Byte-level tokens of real text, as a map-style dataset: nothing to download, every item addressed by its index."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class TextWindows(Dataset):
    """Consecutive windows of ``sequence`` bytes without overlap; the vocabulary is 256.

    ``path``: a file, a folder (its .py, .txt and .md files; no tests, no installed packages), or None for the source
    files of Python's standard library. At most ``limit_bytes`` are read, so every machine with the same files has the
    same windows. Raises FileNotFoundError, and ValueError if there is less than one window of text.
    """

    def __init__(self, path: str | Path | None, sequence: int, limit_bytes: int = 4_000_000) -> None:
        if sequence < 1 or limit_bytes < 1:
            raise ValueError(f"sequence ({sequence}) and limit_bytes ({limit_bytes}) have to be at least 1")
        text = _read(_files(path), limit_bytes)
        self.sequence = sequence
        self._length = (len(text) - 1) // sequence
        if self._length < 1:
            raise ValueError(
                f"data.path: {path or 'the standard library'} has {len(text)} bytes of text (limit {limit_bytes}); "
                f"one window of {sequence} tokens and the byte after it need {sequence + 1}"
            )
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (ids, labels), int64 [sequence] each; labels are the ids one byte later. Raises IndexError."""
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        start = index * self.sequence
        window = self._bytes[start : start + self.sequence + 1].long()
        return window[:-1], window[1:]


def _files(path: str | Path | None) -> Iterator[Path]:
    """Yield files lazily, in an order that depends on names only: a folder's files, then its folders."""
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    if not root.exists():
        raise FileNotFoundError(
            f"data.path: {root} does not exist; leave data.path out to train on Python's standard library"
        )
    if root.is_file():
        yield root
    kinds = {".py"} if path is None else {".py", ".txt", ".md"}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        yield from (Path(folder, name) for name in sorted(names) if Path(name).suffix in kinds)


def _read(files: Iterable[Path], limit: int) -> bytes:
    """Return the beginning of all files one after the other, at most ``limit`` bytes."""
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(limit - len(text))
        if len(text) == limit:
            break
    return bytes(text)
