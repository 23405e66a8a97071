"""Where the logs of a job are: each worker's folder, on which hosts it is, and who serves it there. Workers that found
the same token are in one folder, whatever their hosts. A shared folder is there as long as one of its hosts is. A
folder of one host is gone with that host, and so are the logs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, SupervisorOf
from recycle_plugin.core.messages.from_coordinator import LogsAt, ServeLogs
from recycle_plugin.core.messages.from_workers import LogFolder, LogsServed, Ready
from recycle_plugin.core.vocabulary.commit_rule import unstarted
from recycle_plugin.core.vocabulary.roster import Member, WorkerId


class EndedLog(NamedTuple):
    """The log of a ``member`` that is gone. It has nothing after step ``last``."""

    member: Member
    last: int


class LogPlaces:
    """The folders of a job's logs."""

    def __init__(self) -> None:
        self._tokens: dict[WorkerId, str] = {}  # by worker with a log, live or not
        self._writers: dict[WorkerId, Member] = {}  # likewise
        self._folders: dict[int, LogFolder] = {}  # by rank, that of its latest process
        self._served: dict[int, LogsServed] = {}  # by rank
        self._ended: list[EndedLog] = []  # logs that a replay may need something of

    def ready(self, message: Ready, out: CoordinatorOutput) -> None:
        """Record where a worker logs, and have its supervisor serve that folder."""
        if message.logged_in is not None:
            worker = message.worker
            self._tokens[worker], self._writers[worker] = message.logged_in.token, message.member
            self._folders[worker.rank] = message.logged_in
            if worker.rank in self._served and self._served[worker.rank].token != message.logged_in.token:
                del self._served[worker.rank]  # the worker has come from another host
            self.supervised(worker.rank, out)

    def supervised(self, rank: int, out: CoordinatorOutput) -> None:
        """Have the supervisor of ``rank``, which has come or come again, serve its worker's folder."""
        if rank in self._folders:
            out.tell(SupervisorOf(rank), ServeLogs(rank, self._folders[rank]))

    def served(self, message: LogsServed) -> None:
        """Record where a supervisor serves a folder, if that is still its worker's."""
        folder = self._folders.get(message.rank)
        if folder is not None and folder.token == message.token:
            self._served[message.rank] = message

    def of(self, ranks: Collection[int]) -> tuple[LogsAt, ...]:
        """Return where logs of ``ranks`` are served; () if all workers see one folder. O(processes + supervisors)."""
        if len({*self._tokens.values()}) < 2:
            return ()
        wanted: dict[str, set[int]] = {}
        for worker, token in self._tokens.items():
            if worker.rank in ranks:
                wanted.setdefault(token, set()).add(worker.rank)
        addresses: dict[str, list[str]] = {}
        for _, each in sorted(self._served.items()):
            addresses.setdefault(each.token, []).append(each.address)
        return tuple(
            LogsAt(token, tuple(addresses[token]), tuple(sorted(wanted[token])))
            for token in sorted(wanted)
            if token in addresses
        )

    # --- logs whose writers are gone -----------------------------------------------------------------

    def ended(self, worker: WorkerId, committed: int) -> None:
        """Record that a worker is gone when step ``committed`` was the last one. Its log stays where it was."""
        if worker in self._writers:
            self._ended.append(EndedLog(self._writers[worker], unstarted(committed) - 1))

    def durable(self, step: int) -> None:
        """Drop ended logs that have nothing after ``step``, which is durable."""
        self._ended = [each for each in self._ended if each.last > step]

    def gone(self, is_gone: Callable[[int], bool]) -> list[EndedLog]:
        """Return logs that have become unreachable since the last call, with all hosts of their folder. O(ranks) after
        a loss.
        """
        if not self._ended:
            return []
        there = {folder.token for rank, folder in self._folders.items() if not is_gone(rank)}
        found = [each for each in self._ended if self._tokens[each.member.worker] not in there]
        self._ended = [each for each in self._ended if each not in found]
        return found
