"""Where the logs of a job are: in which folder each worker's is, on which hosts that is, and who serves it there.

Two workers that have found the same token are in one folder, whatever hosts they are on: a shared one is there as long
as any of its hosts is.  One of a host's own goes with that host, and with it the logs in it.
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
    """The log of a ``member`` that is gone, which has nothing behind step ``last``."""

    member: Member
    last: int


class LogPlaces:
    """The folders of a job's logs."""

    def __init__(self) -> None:
        self._tokens: dict[WorkerId, str] = {}  # of all who have a log, whether they are alive or not
        self._writers: dict[WorkerId, Member] = {}  # the same
        self._folders: dict[int, LogFolder] = {}  # by rank, that of its last process
        self._served: dict[int, LogsServed] = {}  # by rank
        self._ended: list[EndedLog] = []  # logs of which a replay may need something

    def ready(self, message: Ready, out: CoordinatorOutput) -> None:
        """Takes in where a worker logs; its supervisor is to serve that."""
        if message.logged_in is not None:
            worker = message.worker
            self._tokens[worker], self._writers[worker] = message.logged_in.token, message.member
            self._folders[worker.rank] = message.logged_in
            if worker.rank in self._served and self._served[worker.rank].token != message.logged_in.token:
                del self._served[worker.rank]  # it has come from elsewhere
            self.supervised(worker.rank, out)

    def supervised(self, rank: int, out: CoordinatorOutput) -> None:
        """Takes in that the supervisor of ``rank`` is there, another one perhaps, which serves nothing yet."""
        if rank in self._folders:
            out.tell(SupervisorOf(rank), ServeLogs(rank, self._folders[rank]))

    def served(self, message: LogsServed) -> None:
        """Takes in where a supervisor serves a folder, if that is still its worker's."""
        folder = self._folders.get(message.rank)
        if folder is not None and folder.token == message.token:
            self._served[message.rank] = message

    def of(self, ranks: Collection[int]) -> tuple[LogsAt, ...]:
        """Where the logs of all processes of ``ranks`` are, as far as they are served; nothing where all see the same
        folder.  Costs one look at each process and at each supervisor.
        """
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
        """Takes in that a worker is gone, with ``committed`` as the last step; its log is where it was."""
        if worker in self._writers:
            self._ended.append(EndedLog(self._writers[worker], unstarted(committed) - 1))

    def durable(self, step: int) -> None:
        """Takes in that nobody needs anything that is logged up to ``step``."""
        self._ended = [each for each in self._ended if each.last > step]

    def gone(self, is_gone: Callable[[int], bool]) -> list[EndedLog]:
        """Which logs nobody can reach any more since this was asked last: all hosts of their folder are gone, which
        ``is_gone(rank)`` says.  Costs one look at each rank, from a loss on until the next checkpoint.
        """
        if not self._ended:
            return []
        there = {folder.token for rank, folder in self._folders.items() if not is_gone(rank)}
        found = [each for each in self._ended if self._tokens[each.member.worker] not in there]
        self._ended = [each for each in self._ended if each not in found]
        return found
