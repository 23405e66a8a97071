"""Megatron's tokenized files (.bin, .idx) as a map-style dataset, read by megatron-core."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor
from torch.utils.data import Dataset


class IndexedWindows(Dataset):
    """Consecutive windows of ``sequence`` tokens without overlap, over all documents in the files' order.

    ``path``: the common prefix of both files; ``vocabulary``: all tokens have to be below it. Data is read on access
    only. Raises FileNotFoundError, and ValueError if there is less than one window.
    """

    def __init__(self, path: str | Path | None, sequence: int, vocabulary: int) -> None:
        for suffix in (".bin", ".idx"):
            if path is None or not Path(f"{path}{suffix}").is_file():
                raise FileNotFoundError(
                    f"data.path: {path}{suffix} does not exist; write the prefix that Megatron's .bin and .idx files "
                    "have in common"
                )
        self._path, self.sequence, self._vocabulary = str(path), sequence, vocabulary
        self._tokens = IndexedDataset(self._path)
        self._ends = numpy.cumsum(self._tokens.sequence_lengths, dtype=numpy.int64)
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._length = (total - 1) // sequence
        if self._length < 1:
            raise ValueError(
                f"data.path: {path} has {total} tokens; one window of {sequence} and the token after it need "
                f"{sequence + 1}"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (ids, labels), int64 [sequence] each; labels are the ids one token later. Raises IndexError, and
        ValueError for a token outside the vocabulary.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"window {index} of {self._length}")
        window = torch.from_numpy(self._read(index * self.sequence, self.sequence + 1).astype(numpy.int64))
        most = int(window.max())
        if most >= self._vocabulary:
            raise ValueError(
                f"data.path: {self._path} has token {most} in window {index}, and model.vocabulary is "
                f"{self._vocabulary}; write at least {most + 1}"
            )
        return window[:-1], window[1:]

    def _read(self, first: int, count: int) -> numpy.ndarray:
        """Return ``count`` tokens from token ``first`` on, across the ends of Megatron's sequences."""
        parts, number = [], int(numpy.searchsorted(self._ends, first, side="right"))
        while count:
            offset = first - int(self._ends[number] - self._tokens.sequence_lengths[number])
            parts.append(self._tokens.get(number, offset, min(count, int(self._ends[number]) - first)))
            first, count, number = first + len(parts[-1]), count - len(parts[-1]), number + 1
        return numpy.concatenate(parts)
