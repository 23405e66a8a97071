"""Newcomers that do nothing: nobody waits for them, but their seats stay empty meanwhile.

A stopped or silent process is given up after the same deadline as any other: others would wait for it in each step to
which it was announced. A script that makes no progress and waits for nobody
is given up after ``idle_timeout_s``. A waiting newcomer has a deadline of its own, ``wait_timeout_s``, after which its
process ends. A replay has its own too (core/coordinator/replay_deadlines.py). Ended processes and lost hosts are seen
by core/coordinator/facts/vacancies.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from recycle_plugin.core.messages.activity import WAITS
from recycle_plugin.core.messages.from_workers import Heartbeat, SupervisorHeartbeat
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass
class _Doing:
    """When a newcomer or its supervisor was ``heard``, what it does, since when, and since when its process is stopped;
    in s of the detector's clock.
    """

    heard: float
    last: tuple[object, ...] | None = None
    since: float = 0.0
    waits: bool = False
    stopped_at: float | None = None


class NewcomerWatch:
    """What newcomers do, by their own and their supervisors' heartbeats."""

    def __init__(self) -> None:
        self._doing: dict[WorkerId, _Doing] = {}

    def hear(self, message: Heartbeat | SupervisorHeartbeat, clock: float) -> None:
        """Record a heartbeat of a newcomer or of its supervisor."""
        doing = self._doing.setdefault(message.worker, _Doing(clock))
        doing.heard = clock
        if isinstance(message, SupervisorHeartbeat):
            doing.stopped_at = (clock if doing.stopped_at is None else doing.stopped_at) if message.stopped else None
        elif doing.last != (now := (message.done, message.doing, message.step)):
            doing.last, doing.since, doing.waits = now, clock, message.doing.at == WAITS

    def late(
        self,
        newcomers: Collection[WorkerId],
        ready: Iterable[WorkerId],
        replaying: Collection[WorkerId],
        deadlines: Deadlines,
        stopped_s: float,
        clock: float,
    ) -> Iterator[tuple[WorkerId, str]]:
        """Yield ``newcomers`` past a deadline, once each, and why. ``ready``: those whose engines stand, of which
        something has to be heard; ``replaying``: those that do or help a replay.
        """
        silent_s, idle_s = deadlines.heartbeat_timeout_s, deadlines.idle_timeout_s
        for worker in ready:
            self._doing.setdefault(worker, _Doing(clock))
        self._doing = {worker: doing for worker, doing in self._doing.items() if worker in newcomers}
        for worker, doing in list(self._doing.items()):
            why = ""
            if (silent := clock - doing.heard) > silent_s:
                why = f"nothing was heard of it or its supervisor for {silent:.1f} s (deadline {silent_s:.1f} s)"
            elif doing.stopped_at is not None and clock - doing.stopped_at > stopped_s:
                why = f"its process is stopped for {clock - doing.stopped_at:.1f} s (deadline {stopped_s:.1f} s)"
            elif doing.last and not doing.waits and worker not in replaying and clock - doing.since > idle_s:
                why = f"its script has made no progress for {clock - doing.since:.1f} s (deadline {idle_s:.1f} s)"
            if why:
                del self._doing[worker]
                yield worker, why
