"""Who may say what to the coordinator: a worker what is of itself, a supervisor what is of the workers that it starts.
What else somebody says changes nothing, though it knows the job's secret.
"""

from __future__ import annotations

from recycle_plugin.core.messages.from_workers import (
    Exited,
    Hello,
    LogsServed,
    Ready,
    StrangersAtLogs,
    SupervisorHeartbeat,
    Terminate,
    Unguarded,
)
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.roster import WorkerId

OF_SUPERVISORS = (Exited, Unguarded, SupervisorHeartbeat, LogsServed, StrangersAtLogs, Terminate)


class Speakers:
    """What each connection may say; which supervisor starts which worker is learnt as the coordinator has it so.

    ``supervised`` is the host and process of each rank's supervisor, which the coordinator keeps up to date.
    """

    def __init__(self, supervised: dict[int, tuple[str, int]]) -> None:
        self._supervised = supervised
        self._starters: dict[WorkerId, tuple[str, int]] = {}

    def comes(self, rank: int) -> None:
        """Note that the supervisor of ``rank`` has come; the first one is that of the rank's first worker."""
        self._starters.setdefault(WorkerId(rank), self._supervised[rank])

    def starts(self, worker: WorkerId) -> None:
        """Note that the supervisor that its rank has now is to start ``worker``."""
        if worker.rank in self._supervised:
            self._starters[worker] = self._supervised[worker.rank]

    def may_say(self, hello: Hello, worker: WorkerId | None, message: object) -> bool:
        """Whether who has come with ``hello``, the process of ``worker`` or a supervisor, may say ``message``.  A
        supervisor that has asked for its rank is known by its host and process.
        """
        if worker is not None:
            its = message.worker if isinstance(message, OfWorker | Ready) else None
            return its == worker and not isinstance(message, OF_SUPERVISORS)
        joined, place = hello.role == "joining", (hello.host, hello.pid)
        if not isinstance(message, OF_SUPERVISORS) or not (joined or message.rank == hello.rank):
            return False
        present = self._supervised.get(message.rank)
        if isinstance(message, OfWorker):
            return self._starters.get(message.worker, present) == place
        return present == place or not joined
