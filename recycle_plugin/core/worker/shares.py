"""What the worker that replays a stage and those who help it say to each other (core/worker/shared_replay.py).

It goes from worker to worker, beside the boundary tensors and as these do: a lot brings the weights of a stage, and a
share brings its gradients.  What is lost on the way, or comes too late, is somebody else's work; so nobody is asked for
it again.
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
    """From the worker ``by``, which is found at ``address``: make ``stage``, whose weights have so many ``bytes``, and
    answer.  ``logs``: where those are that it is made by.
    """

    by: WorkerId
    address: str
    stage: int
    bytes: int
    logs: tuple[LogsAt, ...] = ()


@dataclass(frozen=True)
class Answer:
    """To the worker ``to``: the one ``by`` has its stage ready, or, where it says ``why``, does not help it."""

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
    """To the worker ``to``, from ``by``: what has come of the lot with this ``number``.

    ``sums``: of the weight gradients, by block where sums have blocks; ``kept``: what a log is to have of it.
    """

    by: WorkerId
    to: WorkerId
    number: int
    sums: Any
    kept: tuple[tuple[Datum, Any], ...]


Word = Call | Answer | Lot | Share
