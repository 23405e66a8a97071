"""The movers' messages over TCP, as bytes: a sealed message of LANGUAGE, followed by tensors if it is a Header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recycle_plugin.core.messages.encoding import Language
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.devices.host import bytes_of
from recycle_plugin.runtime.lines.frames import Framing, Nonsense

LONGEST_HEADER = 1 << 20  # bytes; longer ones are invalid
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Sender:
    """The first message on a connection: its sender's address."""

    address: str


@dataclass(frozen=True)
class Header:
    """Precedes the bytes of a datum's tensors, with the dtype and shape of each."""

    datum: Datum
    valid_from: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Apart:
    """A datum whose tensors come over the two workers' link of ``generation`` (runtime/collectives/pairs.py).
    ``number``: of the operation, from 0; the sender has launched it.
    """

    datum: Datum
    valid_from: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    generation: int
    number: int


@dataclass(frozen=True)
class LinkOver:
    """The end of the link of ``generation`` between the two workers. ``sends``: this message's author was the link's
    sender.
    """

    generation: int
    sends: bool


LANGUAGE = Language((Sender, Header, Apart, LinkOver))
FRAMES = Framing(LANGUAGE)


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the dtype and shape of each tensor, as in a header."""
    return tuple([(NAMES[tensor.dtype], tuple(tensor.shape)) for tensor in tensors])


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise Nonsense(f"a tensor of {name[:80]!r}, which is no type")
    return DTYPES[name]


def raw(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.detach()).numpy().data
