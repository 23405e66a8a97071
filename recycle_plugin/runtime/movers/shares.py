"""Workers' words on a replay (core/worker/shares.py) as data of their own kind; the first tensor describes the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recycle_plugin.core.messages.from_coordinator import LogsAt
from recycle_plugin.core.messages.typed import values
from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.shares import Answer, Call, Lot, Share, Word
from recycle_plugin.runtime.devices.port import COPY_S, Tensors
from recycle_plugin.runtime.movers.mover import OF_REPLAYS

Sums = dict[Block | None, Tensors]
"""Sums of weight gradients, one tensor per parameter: by block, or under None the sum of all."""


@dataclass(frozen=True)
class SentWeights:
    """The tensors of a stage's module in host memory, parameters and then buffers, with the loss scale.

    ``layers``: a digest of the layers' settings (runtime.state.surroundings.layers_digest). On the host the tensors are
    the module's own, so they hold until its next step.
    """

    tensors: Tensors
    loss_scale: float
    layers: str = ""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def carried(word: Word) -> tuple[Datum, Tensors]:
    """Return a word as a mover takes it; all tensors must be in host memory."""
    label, tensors = _PACK[type(word)](word)
    description = torch.frombuffer(bytearray(json.dumps([type(word).__name__, *label]).encode()), dtype=torch.uint8)
    return Datum(OF_REPLAYS, 0, None, 0), (description, *tensors)


def word_of(tensors: Tensors) -> Word:
    name, *label = json.loads(bytes(tensors[0].numpy()))
    return _UNPACK[name](label, iter(tensors[1:]))


def _lot(lot: Lot) -> tuple[list[Any], Sequence[torch.Tensor]]:
    return [lot.by, lot.number, lot.step, lot.blocks, lot.weights.loss_scale, lot.weights.layers], lot.weights.tensors


def _lot_of(label: list[Any], tensors: Iterator[torch.Tensor]) -> Lot:
    by, number, step, blocks, scale, layers = label
    weights = SentWeights(tuple(tensors), scale, layers)
    return Lot(WorkerId(*by), number, step, tuple(Block(*each) for each in blocks), weights)


def _share(share: Share) -> tuple[list[Any], Sequence[torch.Tensor]]:
    kept = [(datum, value if type(value) is tuple else value.wait(COPY_S)) for datum, value in share.kept]
    label = [
        share.by,
        share.to,
        share.number,
        [(block, len(tensors)) for block, tensors in share.sums.items()],
        [(datum, len(tensors)) for datum, tensors in kept],
    ]
    groups = [*share.sums.values(), *(tensors for _, tensors in kept)]
    return label, [tensor for tensors in groups for tensor in tensors]


def _share_of(label: list[Any], tensors: Iterator[torch.Tensor]) -> Share:
    by, to, number, blocks, kept = label

    def take(count: int) -> Tensors:
        return tuple(next(tensors) for _ in range(count))

    sums: Sums = {None if block is None else Block(*block): take(count) for block, count in blocks}
    given = tuple((_datum_of(*datum), take(count)) for datum, count in kept)
    return Share(WorkerId(*by), WorkerId(*to), number, sums, given)


def _datum_of(kind: str, stage: int, micro_batch: list[int] | None, step: int) -> Datum:
    return Datum(kind, stage, None if micro_batch is None else MicroBatch(*micro_batch), step)


def _call_of(by: list[int], address: str, stage: int, size: int, logs: list[list[Any]]) -> Call:
    places = tuple(LogsAt(token, tuple(addresses), tuple(ranks)) for token, addresses, ranks in logs)
    return Call(WorkerId(*by), address, stage, size, places)


_PACK: dict[type, Callable[[Any], tuple[list[Any], Sequence[torch.Tensor]]]] = {
    Call: lambda call: ([call.by, call.address, call.stage, call.bytes, [values(each) for each in call.logs]], ()),
    Answer: lambda answer: ([answer.by, answer.to, answer.why], ()),
    Lot: _lot,
    Share: _share,
}
_UNPACK: dict[str, Callable[[list[Any], Iterator[torch.Tensor]], Word]] = {
    "Call": lambda label, tensors: _call_of(*label),
    "Answer": lambda label, tensors: Answer(WorkerId(*label[0]), WorkerId(*label[1]), label[2]),
    "Lot": _lot_of,
    "Share": _share_of,
}
