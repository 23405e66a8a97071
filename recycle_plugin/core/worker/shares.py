"""Messages between a worker that replays a stage and its helpers (core/worker/shared_replay.py). They go from worker to
worker, as boundary tensors do: a lot brings the stage's weights, a share its gradients. A lost or late message is not
asked for again: its blocks are dealt to another worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recycle_plugin.core.messages.from_coordinator import LogsAt
from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass(frozen=True)
class Call:
    """From worker ``by`` at ``address``: make ``stage``, with ``bytes`` of weights, and answer. ``logs``: its logs."""

    by: WorkerId
    address: str
    stage: int
    bytes: int
    logs: tuple[LogsAt, ...] = ()


@dataclass(frozen=True)
class Answer:
    """To the worker ``to``: the worker ``by`` has its stage ready or, with a reason ``why``, does not help."""

    by: WorkerId
    to: WorkerId
    why: str = ""


@dataclass(frozen=True)
class Lot:
    """From the worker ``by``: make the gradients of ``blocks`` of ``step``, with the stage's ``weights`` before it."""

    by: WorkerId
    number: int
    step: int
    blocks: tuple[Block, ...]
    weights: Any


@dataclass(frozen=True)
class Share:
    """To the worker ``to``, from ``by``: the result of lot ``number``. ``sums``: of the weight gradients, by block if
    sums have blocks; ``kept``: what the log is to have of it.
    """

    by: WorkerId
    to: WorkerId
    number: int
    sums: Any
    kept: tuple[tuple[Datum, Any], ...]


Word = Call | Answer | Lot | Share
