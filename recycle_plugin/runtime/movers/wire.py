"""What movers say to each other over TCP, as bytes: a sealed message of LANGUAGE, and behind a Header its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recycle_plugin.core.messages.encoding import Language
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.lines.frames import Framing, Nonsense

LONGEST_HEADER = 1 << 20  # bytes; what says more is none of ours
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Sender:
    """The first message on a connection: the address of its sender."""

    address: str


@dataclass(frozen=True)
class Header:
    """What comes before the bytes of a datum's tensors: the dtype and shape of each."""

    datum: Datum
    valid_from: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Apart:
    """A datum whose tensors come over a link of the two workers (runtime/collectives/pairs.py), of ``generation``, as
    its operation ``number``, from 0 on, which the sender has launched.
    """

    datum: Datum
    valid_from: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    generation: int
    number: int


@dataclass(frozen=True)
class LinkOver:
    """Nothing more goes over the link of ``generation`` between the two, on which who says this ``sends``."""

    generation: int
    sends: bool


LANGUAGE = Language((Sender, Header, Apart, LinkOver))
FRAMES = Framing(LANGUAGE)


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The dtype and shape of each, as a header has them."""
    return tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a header names; raises Nonsense."""
    if name not in DTYPES:
        raise Nonsense(f"a tensor of {name[:80]!r}, which is no type")
    return DTYPES[name]


def raw(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host that has elements."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
