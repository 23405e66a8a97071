"""The declaration in each message's class of its sender, and of when the coordinator accepts it
(core/coordinator/words.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, overload

from recycle_plugin.core.vocabulary.roster import WorkerId

WORKER, SUPERVISOR = "worker", "supervisor"
LONGEST = (1 << 24) - (1 << 10)  # bytes of a message to the coordinator: a standby gets it within another one (Taken)


class ToCoordinator:
    """A message to the coordinator.

    ``by``: a WORKER sends it about itself, or a SUPERVISOR about its workers. ``running``: only once training has
    started. ``ahead``: the steps by which its ``step`` may be ahead of the last committed one; None: the handler judges
    the step. Its ``generation``, if it has one, is at most the newest. ``most``: bytes that are read: all are told a
    part.
    """

    BY: ClassVar[str] = WORKER
    RUNNING: ClassVar[bool] = False
    AHEAD: ClassVar[int | None] = None
    MOST: ClassVar[int] = 1 << 20

    def __init_subclass__(
        cls, by: str = WORKER, running: bool = False, ahead: int | None = None, most: int = 1 << 20
    ) -> None:
        cls.BY, cls.RUNNING, cls.AHEAD, cls.MOST = by, running, ahead, most


class Sender:
    """The worker of a message, made at the first look: functools.cached_property's lock takes longer than the rest."""

    @overload
    def __get__(self, message: None, kind: type) -> Sender: ...
    @overload
    def __get__(self, message: OfWorker, kind: type) -> WorkerId: ...
    def __get__(self, message: OfWorker | None, kind: type) -> Sender | WorkerId:
        if message is None:
            return self
        worker = message.__dict__["worker"] = WorkerId(message.rank, message.incarnation)
        return worker


@dataclass(frozen=True)
class OfWorker(ToCoordinator):
    """A message from a worker, or about one: process ``incarnation`` of ``rank``."""

    rank: int
    incarnation: int = field(default=0, kw_only=True)
    worker = Sender()
