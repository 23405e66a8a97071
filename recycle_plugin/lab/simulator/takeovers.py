"""The coordinators of a simulated job that may die, and take each other's place, without real clock and lines.

Each rank has a host. A host's guard may have the coordinator, and a standby for it; another host has a standby
elsewhere. All of these, and the ends of all connections, run the real code that decides: the switchboard and its state,
who is in step, who may lead, which try comes next (core/coordinator/exchange.py, mirror.py, succession.py,
core/messages/line_end.py).
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from recycle_plugin.core.coordinator.facts.output import WORKERS
from recycle_plugin.core.coordinator.lines import Effects
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.mirror import Known
from recycle_plugin.core.coordinator.switchboard import News, Switchboard
from recycle_plugin.core.messages.from_coordinator import (
    Fence,
    FirstGeneration,
    ForkStandby,
    Generation,
    GenerationChange,
    Restart,
)
from recycle_plugin.core.messages.from_workers import Exited, Hello, Post, ReadBoard
from recycle_plugin.core.messages.generation_forms import whole
from recycle_plugin.core.messages.kept import UNCOUNTED
from recycle_plugin.core.vocabulary.deadlines import APART, TICK_S
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.lab.simulator.coordination import SUPERVISOR, WORKER, Coordination
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.one_history import OneHistory
from recycle_plugin.lab.simulator.scenario import HOSTS, MILLISECOND, TAKEOVERS, Trouble
from recycle_plugin.lab.simulator.simulated_coordinators import Process, SimulatedCoordinator, SimulatedStandby
from recycle_plugin.lab.simulator.simulated_lines import SECOND, Hosts, Side, SimulatedEnd, read
from recycle_plugin.lab.simulator.simulated_spec import SILENCE_S
from recycle_plugin.lab.simulator.simulated_sums import complete

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

STARTING_US = 40 * MILLISECOND  # until a forked process runs
ENDING_US = 15 * SECOND  # how long a worker that is told to end may take
HOME_PORT = 1
DEAF_US = int(APART * SILENCE_S * SECOND)  # so long a coordinator that hears nobody gives nobody up
MOMENT_US = 2 * SECOND  # a line may be cut for so long, and nobody is given up


class Takeovers(Coordination):
    """The coordinators of the job that ``cluster`` runs: one after the other, or two that both believe they lead."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = self._cluster = cluster
        self._pids = 100
        self.hosts, self.one = Hosts(self), OneHistory(cluster.watcher.say)
        board = Switchboard(len(cluster.workers), "a job", 0.0, "host0")
        self.leader = SimulatedCoordinator(self, 0, board)
        self.all = [self.leader]  # all that have coordinated
        self.one.board = board
        self.homes: dict[int, SimulatedCoordinator] = {0: self.leader}  # by the host of their guard
        self._beside: dict[int, SimulatedStandby] = {}  # by host, its standby there
        self._in_step: dict[int, int] = {}  # by host, the process that the guard has heard is in step
        self.candidates: list[SimulatedStandby] = []
        self.ends: dict[tuple[str, int], SimulatedEnd] = {}
        self._tokens: dict[str, SimulatedEnd] = {}
        self._reached: Counter[str] = Counter()
        self._told: set[bytes] = set()
        self._generations: dict[int, Generation] = {}
        self.struck: list[tuple[int, Trouble]] = []  # what has happened to coordinators, and when
        self._apart: set[int] = set()  # hosts that were cut off, or from which others were
        self._sides: list[set[int]] = []  # one side of each partition that has lasted
        self._decided = 0  # the last step that was decided
        self._members = 0
        self._must_go_on = True  # whether the job must go on after the first of these
        self.last_leader_at = 0

    @property
    def membership(self) -> Membership:  # type: ignore[override]
        return self.leader.membership

    @property
    def now_s(self) -> float:
        return self.cluster.now / 1e6

    def next_pid(self) -> int:
        """Return another process's number."""
        self._pids += 1
        return self._pids

    def begin(self) -> None:
        """Begin the coordinator and the supervisors."""
        self._watch(self.leader)
        self.leader.begin()
        for rank in self.cluster.workers:
            hello = Hello(rank, SUPERVISOR, 1000 + rank, f"host{rank}")
            self.ends[SUPERVISOR, rank] = SimulatedEnd(
                self,
                hello,
                lambda: ("host0", HOME_PORT),
                lambda: None,
                partial(self._supervise, rank),
                partial(self._lose_supervisor, rank),
            )
        self._look()

    def _look(self) -> None:
        for end in list(self.ends.values()):
            end.look(APART * SILENCE_S)
        self.cluster.later(int(TICK_S * 1e6), self._look)

    # --- calls ------------------------------------------------------------------------------------------

    def call(self, name: tuple, caller: int, address: tuple[str, int]) -> Side | None:
        """Connect to the process at ``address``; None if nobody listens, or the host can't be reached."""
        listener = self._listening(address)
        if listener is None or self.is_silent(caller, address) or listener.stopped_until > self.cluster.now:
            return None
        near, far = self.hosts.connected(name, caller, listener.host)
        listener.answers(far)
        return near

    def is_silent(self, caller: int, address: tuple[str, int]) -> bool:
        """Return whether nothing at all comes from there."""
        host, there = int(address[0].removeprefix("host")), self._listening(address)
        if there is not None and there.stopped_until > self.cluster.now:
            return True
        return not self.hosts.reaches(caller, host) or not self.hosts.reaches(host, caller)

    def _listening(self, address: tuple[str, int]) -> Process | None:
        host = int(address[0].removeprefix("host"))
        if address[1] == HOME_PORT or any(each.host == host and self._port(each) == address[1] for each in self.all):
            there = self.homes.get(host)
            return there if there is not None and there.alive and self._port(there) == address[1] else None
        return next((each for each in self.candidates if each.alive and each.port == address[1]), None)

    def _port(self, coordinator: SimulatedCoordinator) -> int:
        """Return where a coordinator and its successors listen: the launcher's port, or where it stood by."""
        return self._ports.get(coordinator.host, HOME_PORT)

    @property
    def _ports(self) -> dict[int, int]:
        return {each.host: each.port for each in self.candidates if each.leads is not None}

    # --- processes ----------------------------------------------------------------------------------------

    def _watch(self, coordinator: SimulatedCoordinator) -> None:
        coordinator.mirror.watch(partial(self._changes, coordinator))
        self.cluster.later(STARTING_US, partial(self._have_one_stand_by, coordinator))

    def _changes(self, coordinator: SimulatedCoordinator, pid: int) -> None:
        """Do what a guard does when another process is in step."""
        host = coordinator.host
        if self._in_step.get(host) and not pid and host in self._beside:
            self.kill_process(self._beside[host])
        self._in_step[host] = pid
        if pid:
            self.reach("in step")

    def _have_one_stand_by(self, coordinator: SimulatedCoordinator) -> None:
        host = coordinator.host
        if coordinator.alive and not coordinator.deposed and host not in self._beside:
            address = f"host{host}", self._port(coordinator)
            self._beside[host] = SimulatedStandby(self, host, address, False)

    def kill_process(self, process: Process) -> None:
        """Kill a coordinator or a standby; its guard sees that soon."""
        if process.alive:
            process.dies()
            self.cluster.later(MILLISECOND, partial(self.ended, process))

    def ended(self, process: Process) -> None:
        """Do what a guard does when one of its processes has ended."""
        if isinstance(process, SimulatedStandby):
            if self._beside.get(process.host) is process:
                del self._beside[process.host]
                self._in_step[process.host] = 0
                if (its := self.homes.get(process.host)) is not None and its.alive:
                    self.cluster.later(STARTING_US, partial(self._have_one_stand_by, its))
            return
        assert isinstance(process, SimulatedCoordinator), "nobody else"
        if self.homes.get(process.host) is not process:
            return
        beside, in_step = self._beside.pop(process.host, None), self._in_step.pop(process.host, 0)
        del self.homes[process.host]
        if process.deposed:
            process.dies()
        goes_on = beside is not None and beside.alive and beside.pid == in_step and not process.deposed
        if goes_on and beside is not None and beside.known is not None:
            self._goes_on_at_home(process, beside.known)
        if beside is not None:
            beside.dies()

    def _goes_on_at_home(self, before: SimulatedCoordinator, known: Known) -> None:
        made = SimulatedCoordinator(self, before.host, known.board, known)
        self.homes[before.host] = made
        self._leads_now(made, known, of=before)
        self.cluster.exercised[ProtocolRule.WENT_ON] += 1
        made.took_over()
        self._watch(made)
        self.reach("home")

    def moves(self, candidate: SimulatedStandby, made: SimulatedCoordinator, known: Known) -> None:
        """Handle that a standby elsewhere coordinates now."""
        self.homes[candidate.host] = made
        self._leads_now(made, known)
        self.cluster.exercised[ProtocolRule.MOVED] += 1
        self._watch(made)

    def _leads_now(self, made: SimulatedCoordinator, known: Known, of: SimulatedCoordinator | None = None) -> None:
        self.all.append(made)
        if of is not None and of is not self.leader:
            return  # another host's process coordinates already
        self.leader, self.last_leader_at = made, self.cluster.now
        told = [event for _, event in self.cluster.events[-100:]]
        self.cluster.tell([event for event in known.events if event not in told])
        self.one.leads(made.board, self.ends)
        made.over |= made.board.over is not None

    # --- what workers and supervisors say and hear ------------------------------------------------------------

    def reaches(self, rank: int) -> bool:
        """Return whether the host of ``rank`` is there: what is said there is kept until it gets through."""
        return rank not in self.cluster.lost_hosts

    def joined(self, ranks: frozenset[int]) -> bool:
        """Return whether these ranks reach each other."""
        some = min(ranks)
        lost = self.cluster.lost_hosts
        return all(rank in lost or some in lost or self.hosts.reaches(some, rank) for rank in ranks)

    def begins_with(self, worker: SimulatedMachine) -> bool:
        """Have a worker come to the coordinator; it is let in later."""
        return self.begins(worker)

    def begins(self, worker: SimulatedMachine) -> bool:
        """Have a worker's next process come to the coordinator; it is let in later."""
        rank, incarnation = worker.rank, worker.control_view.incarnation
        hello = Hello(rank, WORKER, self.next_pid(), f"host{rank}", incarnation)
        if (before := self.ends.get((WORKER, rank))) is not None:
            before.close()
        self.ends[WORKER, rank] = SimulatedEnd(
            self,
            hello,
            partial(self._address_of, rank),
            partial(self._let_in, worker),
            partial(self.cluster.deliver, worker),
            partial(self._lost, worker),
        )
        return False

    def _address_of(self, rank: int) -> tuple[str, int]:
        """Return where the supervisor of ``rank`` finds the coordinator."""
        supervisor = self.ends.get((SUPERVISOR, rank))
        return ("host0", HOME_PORT) if supervisor is None else supervisor.address

    def _let_in(self, worker: SimulatedMachine) -> None:
        if worker.alive:
            self.cluster.begin(worker)

    def _lost(self, worker: SimulatedMachine) -> None:
        if self.ends[WORKER, worker.rank].line < 0:  # it was never let in
            self.cluster.kill(worker.rank)
        elif worker.alive and worker.control_view.lose_coordinator():
            self.cluster.wake(worker)

    def _lose_supervisor(self, rank: int) -> None:
        self.cluster.later(ENDING_US, partial(self.cluster.kill, rank))

    def end_of(self, token: str) -> SimulatedEnd | None:
        """Return the end of the connection that has that token, or None."""
        if token not in self._tokens:
            self._tokens |= {end.token: end for end in self.ends.values() if end.token}
        return self._tokens.get(token)

    def say(self, rank: int, message: object, by: str, worker: WorkerId) -> None:
        """Send a message to the coordinator."""
        role = SUPERVISOR if isinstance(message, Exited) else by
        if (end := self.ends.get((role, rank))) is not None:
            end.send(message)

    def say_at_once(self, rank: int, message: Post | ReadBoard) -> None:
        """Send a message about a board, which takes time here too."""
        self.say(rank, message, WORKER, WorkerId(rank))

    def disconnect(self, rank: int, line: str = WORKER, worker: WorkerId | None = None) -> None:
        """Close the connection of a process that has died."""
        end = self.ends.get((line, rank))
        if end is not None and self.reaches(rank) and (worker is None or end.hello.incarnation == worker.incarnation):
            end.close()

    def lose_supervisor(self, rank: int) -> None:
        """Do nothing: the supervisor of a lost host says nothing more."""

    def _supervise(self, rank: int, message: object) -> None:
        cluster = self.cluster
        if isinstance(message, Fence) and not cluster.workers[rank].unfenced:
            cluster.kill_fenced(message.worker)
        elif isinstance(message, Restart):
            cluster.later(int(message.after_s * 1e6), partial(cluster.restart, message))
        elif isinstance(message, ForkStandby):
            self.reach("asked")
            cluster.later(STARTING_US, partial(self._stand_by_elsewhere, rank))

    def _stand_by_elsewhere(self, rank: int) -> None:
        there = [each for each in self.candidates if each.host == rank and (each.alive or each.leads is not None)]
        if self.reaches(rank) and rank not in self.homes and not there:
            address = self.ends[SUPERVISOR, rank].address
            self.candidates.append(SimulatedStandby(self, rank, address, True))

    # --- what is seen of it -------------------------------------------------------------------------------------

    def takes(self, coordinator: SimulatedCoordinator, news: News) -> None:
        """Record that a coordinator hears something."""
        line = coordinator.board.lines.get(news.line)
        if coordinator is self.leader and news.kind == "said" and line is not None and line.hello.rank >= 0:
            lost = getattr(news.message, "worker", None) in coordinator.membership.lost
            if not isinstance(news.message, UNCOUNTED):
                self.cluster.heard(line.hello.rank, news.message, lost)

    def decided(self, coordinator: SimulatedCoordinator) -> None:
        """Record that a coordinator has taken something in: what follows is decided, and seen once it is out."""
        if coordinator is self.leader:
            if (members := len(coordinator.membership.roster)) > self._members > 0:
                self.reach("grows")
            self._members = members
            self.cluster.note_departures()
            if coordinator.membership.committed >= self._decided:  # else one before has died with that decision
                self._decided = coordinator.membership.committed
                self.cluster.watcher.committed(self.cluster)

    def released(self, coordinator: SimulatedCoordinator, effects: Effects, again: bool) -> None:
        """Record that others see the effects of news. ``again``: some of them for the second time."""
        if coordinator is not self.leader:
            return
        cluster, board = self.cluster, coordinator.board
        lines: dict[bytes, list[int]] = {}
        for line, frame in effects.frames:
            if line in board.lines:  # else it has closed since this was decided
                lines.setdefault(frame, []).append(line)
        for frame, numbers in lines.items():
            message, its = self._whole(read(frame)), board.lines[numbers[0]]
            if isinstance(message, UNCOUNTED) or (again and frame in self._told):
                continue
            self._told.add(frame)
            if isinstance(message, Fence) and its.hello.role == SUPERVISOR:
                cluster.watcher.fenced(cluster, its.hello.rank, message.reason)
            elif its.worker is not None:
                everybody = set(numbers) >= set(board._lines_of(WORKERS)) and len(numbers) > 1
                cluster.watcher.told(WORKERS if everybody else its.worker, message)

    def _whole(self, message: object) -> object:
        """Return the generation of which ``message`` says what has changed."""
        if isinstance(message, GenerationChange):
            message = message.behind(self._generations[message.since])
        if isinstance(message, FirstGeneration):
            message = whole(message)
        if isinstance(message, Generation):
            self._generations[message.number] = message
        return message

    @property
    def may_end(self) -> bool:  # type: ignore[override]
        """Whether the job may end for want of a coordinator: several troubles struck, or one that leaves no side enough
        workers.
        """
        return len(self.struck) > 1 or not self._must_go_on

    def finished(self) -> None:
        """Check at the end that there is a coordinator; if none may lead, the job ends as failed."""
        leader, alone = self.leader, all(end.dead for (role, _), end in self.ends.items() if role == WORKER)
        if not leader.alive or leader.deposed or leader.stopped_until > self.cluster.now or (alone and self.may_end):
            self.leader.board.fail("nobody coordinates any more", self.now_s, Effects())
        elif not self.may_end or self.membership.ended is None or not self.membership.ended.failed:
            self._nobody_healthy_is_lost()

    @property
    def _doomed(self) -> set[int]:
        """The ranks to which other troubles happen, at any time."""
        scenario = self.cluster.scenario
        seats = {seat for each in scenario.troubles if each.kind not in TAKEOVERS for seat in each.seats}
        return {self.cluster.rank_of[seat] for seat in seats | {each.seat for each in scenario.faults}}

    def _nobody_healthy_is_lost(self) -> None:
        """Check that takeovers cost only workers on hosts that are gone, or were cut off."""
        lost = {worker.rank for worker in self.membership.lost} - self._apart - self.cluster.lost_hosts - self._doomed
        for side in self._sides:
            if len(self.struck) > 1 or lost <= side or not lost & side:  # the job goes on with one of two sides
                lost = set()
        for rank in sorted(lost):
            self.cluster.watcher.say(f"rank {rank} is lost, and nothing has happened to it")

    # --- troubles -------------------------------------------------------------------------------------------------

    def reach(self, point: str) -> None:
        """Reach a step of a takeover, at which troubles may begin."""
        self._reached[point] += 1
        for trouble in self.cluster.scenario.troubles:
            if (trouble.point, trouble.number) == (point, self._reached[point]):
                self.cluster.later(trouble.at_us, partial(self.cluster.strike, trouble))

    def strike(self, trouble: Trouble) -> None:
        """Let a trouble strike the present coordinator or standby."""
        leader, candidate = self.leader, next((each for each in self.candidates if each.alive and not each.leads), None)
        beside = self._beside.get(leader.host)
        struck = {"coordinator": leader, "standby": beside, "candidate": candidate}.get(trouble.kind)
        if trouble.kind in HOSTS:
            struck = leader if trouble.kind == HOSTS[0] else candidate
        if trouble.kind in ("coordinator", "standby", "candidate", *HOSTS) and (struck is None or not struck.alive):
            return
        self._must_go_on = self._leaves_enough(trouble, struck)
        self.struck.append((self.cluster.now, trouble))
        term = leader.board.succession.term  # a worker that has not heard of it does not know where to turn
        self._apart |= {rank for (role, rank), end in self.ends.items() if role == WORKER and end._term.term < term}
        if trouble.kind in HOSTS and struck is not None:
            self.cluster.lose_host(struck.host)
            self._host_dies(struck.host)
        elif struck is not None:
            self.kill_process(struck)
        elif trouble.kind == "reset":
            self._apart |= set() if candidate is None else candidate.hangs_up()
        elif trouble.kind == "line":
            ranks = {self.cluster.rank_of[seat] for seat in trouble.seats}
            self._apart |= ranks if leader.stopped_until > self.cluster.now else set()  # nobody answers them
            for rank in ranks:
                self.ends[WORKER, rank].resets()
        elif trouble.kind == "pause":
            leader.stopped_until = self.cluster.now + trouble.for_us
            self.cluster.later(trouble.for_us, leader.go_on)
        elif trouble.kind == "hold":
            way = "from" if trouble.percent else "to"
            self._apart |= {leader.host} if trouble.for_us < DEAF_US else self.cluster.workers.keys()
            self.hosts.hold(way, leader.host, True)
            self.cluster.later(trouble.for_us, partial(self.hosts.hold, way, leader.host, False))
        elif trouble.kind == "partition":
            ranks = {self.cluster.rank_of[seat] for seat in trouble.seats} or {leader.host}
            self._cut(ranks - self.cluster.lost_hosts, trouble.for_us)

    def _leaves_enough(self, trouble: Trouble, struck: Process | None) -> bool:
        """Return whether one side has enough workers to go on after this. ``struck``: the process that it strikes."""
        leader, told = self.leader, self.leader.board.succession.address
        if leader.membership.committed >= self.cluster.scenario.steps - 1:
            return False  # some may have left, and still be members
        if not leader.membership.started:
            return trouble.kind in ("standby", "candidate")
        members = {member.rank for member in leader.membership.roster}
        live = {rank for rank in members if self.cluster.workers[rank].alive} - self._doomed
        if trouble.kind in HOSTS and struck is not None:
            stages = {self.cluster.workers[rank].seat.stage for rank in live - {struck.host}}
            if stages != set(range(self.cluster.scenario.shape.stages)):
                return False  # it has a stage's last worker
        settled = told is not None and all(end._term.term for end in self.ends.values() if not end.dead)
        candidate = int(told[0].removeprefix("host")) if told is not None and settled else None
        if trouble.kind == "coordinator":
            return bool(self._in_step.get(leader.host)) or candidate is not None
        if trouble.kind == HOSTS[0]:
            return candidate is not None and 2 * len(live - {leader.host}) > len(members) + 1
        cut = {self.cluster.rank_of[seat] for seat in trouble.seats} or {leader.host}
        if trouble.kind != "partition":
            return trouble.kind not in ("pause", "hold") or trouble.for_us < SECOND
        home = live & (cut if leader.host in cut else members - cut)
        there = live - home
        if candidate is None:
            return False
        if candidate in home or 2 * len(home) > len(members) + 1:
            return 2 * len(home) > len(members) + 1
        return 2 * len(there) > len(members) + 1

    def _host_dies(self, host: int) -> None:
        self.hosts.dies(host)
        for process in [*self.all, *self.candidates, *self._beside.values()]:
            if process.host == host:
                process.alive = False
        self.homes.pop(host, None)
        self._beside.pop(host, None)
        for role in (WORKER, SUPERVISOR):
            self.ends[role, host].dead = True

    def _cut(self, ranks: set[int], for_us: int) -> None:
        self.cluster.cut |= ranks
        if for_us >= MOMENT_US:
            self._sides.append(ranks)
        for rank in ranks:
            self.cluster.touch_sums(rank)
        self.cluster.later(for_us, partial(self._mend, ranks))

    def _mend(self, ranks: set[int]) -> None:
        self.cluster.cut -= ranks - self.cluster.lost_hosts
        self.hosts.flow()
        for sum_ in list(self.cluster.sums.values()):
            complete(self.cluster, sum_)
