"""What movers say to each other over TCP, as bytes: a sealed message of LANGUAGE, and behind a Header its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recycle_plugin.core.messages.encoding import Language
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.runtime.lines.frames import Framing

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


LANGUAGE = Language((Sender, Header))
FRAMES = Framing(LANGUAGE)


def raw(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host that has elements."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
