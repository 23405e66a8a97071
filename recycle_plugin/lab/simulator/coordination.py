"""The coordinator of a simulated job to which nothing happens but a stall: core/coordinator/membership.py, of which all
others hear over lines that take time. lab/simulator/takeovers.py has coordinators that die.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.facts.output import (
    LAST_STAGE,
    SUPERVISORS,
    WORKERS,
    CoordinatorOutput,
    SupervisorOf,
)
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.state_dump import dump, load
from recycle_plugin.core.coordinator.words import Speakers
from recycle_plugin.core.messages.from_coordinator import Fence, Generation, Restart
from recycle_plugin.core.messages.from_workers import Hello, Post, ReadBoard
from recycle_plugin.core.messages.generation_forms import GenerationForEach, whole
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.scenario import Trouble
from recycle_plugin.lab.simulator.simulated_spec import DEADLINES

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

WORKER, SECOND, SUPERVISOR = "worker", "second", "supervisor"  # lines to the coordinator and back (there, back)
SECOND_PROCESS = 100  # an incarnation that nobody has asked for


class Coordination:
    """The coordinator of the job that ``cluster`` runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.membership = Membership(len(cluster.workers))
        self._speakers = Speakers({rank: (f"host{rank}", 0) for rank in cluster.workers})
        for rank in cluster.workers:
            self._speakers.starts(WorkerId(rank))
        self._inbox: deque[Callable[[], None]] = deque()  # what it has not read yet
        self._stalled_until, self._reloads = 0, Random(f"reloads in {cluster.scenario.torn}")
        self._watched = -1

    def begin(self) -> None:
        """Begin to let time pass."""
        self._tick()

    may_end = False  # whether what happened to coordinators allows the job's end

    def finished(self) -> None:
        """Check at the end what has become of coordinators."""

    def stall(self, for_us: int) -> None:
        """Have the coordinator read nothing for a while."""
        self._stalled_until = self._cluster.now + for_us
        self._cluster.later(for_us, self._read)

    # --- what it hears --------------------------------------------------------------------------------

    def say_at_once(self, rank: int, message: Post | ReadBoard) -> None:
        """Bring ``message`` to the coordinator, and the answers back, in no time. Boards decide nothing of the course
        of a job, so all other times stay as they are.
        """
        cluster = self._cluster
        cluster.exercised.said(message, self.membership)
        output = self.membership.receive(message, cluster.now / 1e6)
        assert not output.events, output.events
        for worker in cluster.workers.values():
            for whom, answer in output.messages:
                if worker.alive and whom == worker.control_view.worker:
                    worker.control_view.take(answer)
                    if worker.counts:
                        cluster.wake(worker)

    def say(self, rank: int, message: object, by: str, worker: WorkerId) -> None:
        """Have ``message`` travel to the coordinator on connection ``by``, of ``worker``'s process or supervisor."""
        role, process = ("supervisor", None) if by == SUPERVISOR else ("worker", worker)
        if by == SECOND:
            process = WorkerId(rank, SECOND_PROCESS)
        hello = Hello(rank, role, 0, f"host{rank}", worker.incarnation)
        self._travel((by, "there", rank), partial(self._hear, rank, message, hello, process))

    def disconnect(self, rank: int, line: str = WORKER, worker: WorkerId | None = None) -> None:
        """Break a connection: the coordinator reads what the worker has said, then that there is no more."""
        self._travel((line, "there", rank), partial(self._lose_connection, worker or WorkerId(rank)))

    def lose_supervisor(self, rank: int) -> None:
        """Break the connection of the supervisor of ``rank``, with nothing under way."""
        self._at_coordinator(partial(self._now, lambda now: self.membership.supervisor(rank, False, now)))

    def strike(self, trouble: Trouble) -> None:
        """Let a trouble strike the coordinator or a standby; not possible here."""
        raise NotImplementedError(trouble)

    def reaches(self, rank: int) -> bool:
        """Return whether messages from the host of ``rank`` get to the coordinator."""
        return rank not in self._cluster.cut

    def joined(self, ranks: frozenset[int]) -> bool:
        """Return whether these ranks reach each other; here they find out by themselves if they can't."""
        return True

    def begins_with(self, worker: SimulatedMachine) -> bool:
        """Record one of the processes that the job begins with. Return whether it was let in already."""
        return True

    def begins(self, worker: SimulatedMachine) -> bool:
        """Record that a process has begun in another's place. Return whether it was let in already."""
        self._act(self.membership.greet(worker.control_view.worker, f"host{worker.rank}"))
        return True

    def _travel(self, line: tuple, happen: Callable[[], None]) -> None:
        self._cluster.travel(line, partial(self._at_coordinator, happen))

    def _at_coordinator(self, happen: Callable[[], None]) -> None:
        """Have the coordinator do something: one thing after the other, and nothing while it is stalled."""
        self._inbox.append(happen)
        if self._cluster.now >= self._stalled_until:
            self._read()

    def _read(self) -> None:
        scenario = self._cluster.scenario
        while self._inbox and self._cluster.now >= self._stalled_until:
            if scenario.reloads and self._reloads.random() < scenario.reloads:
                self.membership = load(json.loads(json.dumps(dump(self.membership))))
                self._cluster.exercised[ProtocolRule.RELOADED] += 1
            self._inbox.popleft()()

    def _hear(self, rank: int, message: object, hello: Hello, worker: WorkerId | None) -> None:
        """Hand a message to the coordinator, unless its sender may not send it."""
        if self._speakers.may_say(hello, worker, message):
            self._receive(rank, message)
        else:
            self._cluster.exercised[ProtocolRule.REFUSED_WORD] += 1

    def _receive(self, rank: int, message: object) -> None:
        """Hand a message to the coordinator. What is under way is lost with the host that it comes from."""
        cluster = self._cluster
        if rank in cluster.cut:
            return
        membership = self.membership
        changing, lost = membership.regrouping is not None, getattr(message, "worker", None) in membership.lost
        cluster.heard(rank, message, lost)
        output = membership.receive(message, cluster.now / 1e6)
        self._act(output, message, changing, lost)

    def _now(self, happen: Callable[[float], CoordinatorOutput]) -> None:
        self._act(happen(self._cluster.now / 1e6))

    def _lose_connection(self, worker: WorkerId) -> None:
        changing = self.membership.regrouping is not None
        self._act(self.membership.connection_lost(worker, self._cluster.now / 1e6), changing=changing)

    def _tick(self) -> None:
        self._at_coordinator(partial(self._now, lambda now: self.membership.tick(now)))
        self._cluster.later(int(TICK_S * 1e6), self._tick)

    def _overdue(self, number: int) -> None:
        if self.membership.regrouping == number:
            self._act(self.membership.regroup_overdue(DEADLINES.agreement_s))

    # --- what it says ---------------------------------------------------------------------------------

    def _act(self, output: CoordinatorOutput, cause: object = None, changing: bool = False, lost: bool = False) -> None:
        """Deliver the coordinator's messages. ``changing``, ``lost``: as in lab/simulator/exercised.py."""
        cluster = self._cluster
        cluster.exercised.answered(cause, output, self.membership, changing, lost)
        cluster.note_departures()
        cluster.tell(output.events)
        for whom, message in output.messages:
            if whom == SUPERVISORS:  # the end of the job
                continue
            if isinstance(whom, SupervisorOf):
                self._tell_supervisor(whom.rank, message)
                continue
            cluster.watcher.told(whom, message)
            for rank, worker in cluster.workers.items():
                addressed = (
                    self.membership.is_of(whom, worker.control_view.worker)
                    if whom in (WORKERS, LAST_STAGE)
                    else worker.control_view.worker == whom
                )
                if addressed and rank not in cluster.cut:
                    told = _told(message, worker)
                    cluster.travel((WORKER, "back", rank), partial(cluster.deliver, worker, told))
        cluster.watcher.committed(cluster)
        number = self.membership.regrouping
        if number is not None and number != self._watched:
            self._watched = number
            cluster.later(int(DEADLINES.agreement_s * 1e6), partial(self._overdue, number))

    def _tell_supervisor(self, rank: int, message: object) -> None:
        cluster = self._cluster
        if isinstance(message, Fence):
            cluster.watcher.fenced(cluster, rank, message.reason)
            if rank not in cluster.cut and not cluster.workers[rank].unfenced:
                cluster.travel((SUPERVISOR, "back", rank), partial(cluster.kill_fenced, message.worker))
        if isinstance(message, Restart):
            self._speakers.starts(message.worker)
        if isinstance(message, Restart) and rank not in cluster.cut:
            wait = partial(cluster.later, int(message.after_s * 1e6), partial(cluster.restart, message))
            cluster.travel((SUPERVISOR, "back", rank), wait)


def _told(message: object, worker: SimulatedMachine) -> object:
    """Return ``message`` as ``worker`` hears it: of the members of a generation, where those near it are."""
    if not isinstance(message, Generation):
        return message
    hosts = {member.host: number for number, member in enumerate(message.members)}
    return whole(GenerationForEach(message, hosts).first(worker.seat, worker.held.shard))
