"""A simulated cluster: a whole job in virtual time, in which only clock, network and tensors are simulated.

Every worker runs core/worker/training_loop.py over core/worker/executor.py. Its messages, of core/messages/, go to one
core/coordinator/membership.py, whose answers come back over lines that take time (lab/simulator/message_delays.py),
stop, or break. Weights are exact numbers (lab/simulator/arithmetic.py). lab/simulator/scenario.py has what may go
wrong; lab/simulator/checkers.py checks what must hold, during the run and at its end. The same seed gives the same
events.

lab/simulator/virtual.py runs one membership at a time, and answers how long things take. Here workers learn of changes
one by one, at any instant, so this answers whether anything can break.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from recycle_plugin.core.coordinator.facts.output import Event
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import End, Fence, Generation, Restart
from recycle_plugin.core.messages.from_workers import (
    Exited,
    Fatal,
    Heartbeat,
    Leaving,
    Logged,
    Post,
    ReadBoard,
    SupervisorHeartbeat,
    Terminate,
    Unreplayable,
)
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, Instruction, Op
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.lockstep import Word
from recycle_plugin.core.worker.loop_ports import LEAVE
from recycle_plugin.lab.simulator.confusion import Confusion
from recycle_plugin.lab.simulator.coordination import SECOND, SECOND_PROCESS, SUPERVISOR, WORKER, Coordination
from recycle_plugin.lab.simulator.exercised import Exercised, ProtocolRule
from recycle_plugin.lab.simulator.message_delays import CLOSE, MessageDelays
from recycle_plugin.lab.simulator.pushed_machine import SimulatedPushedMachine
from recycle_plugin.lab.simulator.pushed_script import PushedScript
from recycle_plugin.lab.simulator.scenario import MILLISECOND, TAKEOVERS, Scenario, Trouble
from recycle_plugin.lab.simulator.script import Died, SimulatedScript
from recycle_plugin.lab.simulator.shared_planner import SharedPlanner
from recycle_plugin.lab.simulator.simulated_log import SimulatedLog
from recycle_plugin.lab.simulator.simulated_spec import rank_at
from recycle_plugin.lab.simulator.simulated_state import SimulatedLine
from recycle_plugin.lab.simulator.simulated_sums import Sum
from recycle_plugin.lab.simulator.simulated_worker import Holding, SimulatedMachine

DATA, SHARES = "data", "shares"  # kinds of lines from rank to rank
DETECTION_US = 20 * MILLISECOND  # until a connection's other end or a supervisor sees a death
# at most this long what goes over a line is delayed, perhaps by more; later data overtakes it
DELAYING_US = 300 * MILLISECOND
HEARTBEAT_US = 200 * MILLISECOND
LAST_WORDS_US = 10_000 * MILLISECOND  # until a script's last message has come, or its silence counts


class Cluster:
    """A cluster that runs one scenario, checked by ``watcher``. Times are microseconds of its clock, ``now``."""

    def __init__(
        self,
        scenario: Scenario,
        weights: tuple[int, ...],
        watcher: Any,
        coordination: Callable[[Cluster], Coordination] = Coordination,
    ) -> None:
        self.scenario, self.watcher, self.random = scenario, watcher, Random(scenario.torn)
        self._ran_until = 0  # until when a script ran
        self.now, self._ticket = 0, count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.planner = SharedPlanner(scenario.costs, scenario.policy)
        self.logs: list[SimulatedLog] = []  # of all processes, present and past
        self.chosen: list[tuple[int, ...]] = list(scenario.log_choices[:1])  # boundaries to log, as announced
        self.log_damages = Random(f"damaged logs in {scenario.torn}")
        self.replayed: list[tuple[Seat, Instruction]] = []  # instructions begun in replays
        self.refusals = Random(f"refusals to help in {scenario.torn}")
        self.damaged: set[str] = set()  # data damaged in logs, in words
        self.lost_hosts: set[int] = set()  # by rank
        self.taken: dict[str, int] = {}  # data gone with a host's log, in words, and when
        self.unlogged: set[Datum] = set()  # data lost with a process before it was on its disk
        self.logged: dict[WorkerId, int] = {}  # the last step that each has reported on its disk, while it was not lost
        self.saved: dict[tuple[int, int], tuple[int, dict[str, int]]] = {}  # by (step, stage): weight and moments
        self.workers = {
            rank: self._machine(rank, weights[seat.stage])
            for rank, seat in enumerate(seat for seat in scenario.shape.seats for _ in range(scenario.shards))
        }
        self.pipes: dict[str, SimulatedLine] = {}  # by address, between sources and newcomers
        self._damages = Random(f"damages in {scenario.torn}")
        self.rank_of = {  # of the worker of each seat that troubles strike
            seat: place * scenario.shards + scenario.struck for place, seat in enumerate(scenario.shape.seats)
        }
        # by generation, op, its first stage, step, shard, what
        self.sums: dict[tuple[int, Op, int, int, int, str], Sum] = {}
        self.events: list[tuple[int, Event]] = []
        self.spans: list[Span] = []
        self.links: dict[tuple[int, int], tuple[str, int, int]] = {}  # (kind, until, delay)
        self.cut: set[int] = set()
        # nobody complains of missing data
        self.quiet = any(trouble.kind == "swallow" for trouble in scenario.troubles)
        self.deafened: dict[int, bool] = {}  # ranks that nothing reaches, and whether they know
        self.hits: Counter[tuple[str, Op]] = Counter()  # by (kind of trouble, the worker's instruction)
        self.exercised = Exercised()
        self.lines = MessageDelays(scenario.weather, scenario.torn)
        self.confusion = Confusion(scenario.torn)
        self._in_seats = MessageDelays(CLOSE, scenario.torn)
        self.over = False
        self._departed: set[int] = set()
        self._joining: set[WorkerId] = set()
        self._fenced: set[WorkerId] = set()  # killed by their supervisors
        # data by number: (source, target, its arrival)
        self._under_way: dict[int, tuple[int, int, Callable[[], None]]] = {}
        self.returned: list[SimulatedMachine] = []  # replaced processes
        # checkpoints, whole or not, by (step, attempt): the weight of each writer, None if it could not write
        self.written: dict[tuple[int, int], dict[Holding, int | None]] = {}
        self.coordination = coordination(self)

    def run(self, until_us: int) -> None:
        """Run until nobody has anything left to do, or until ``until_us``."""
        for worker in self.workers.values():
            if self.coordination.begins_with(worker):
                self.begin(worker)
        for trouble in self.scenario.troubles:
            if not trouble.point:
                self.later(trouble.at_us, partial(self.strike, trouble))
        self.later(0, self.coordination.begin)
        self.later(0, self._send_heartbeats)
        while self._agenda and self._agenda[0][0] <= until_us and self._goes_on():
            self.now, _, happen = heappop(self._agenda)
            happen()
        self.exercised[ProtocolRule.FOR_WANT_OF_ROOM] = sum(worker.store.let_go for worker in self.workers.values())

    @property
    def membership(self) -> Membership:
        return self.coordination.membership

    def _goes_on(self) -> bool:
        """Return whether anybody has something left to do, or is still to come for an empty stage."""
        if self.scenario.takes_over:  # connections would be served for ever
            if any(worker.alive and worker.runs for worker in self.workers.values()):
                self._ran_until = self.now
            return self.now <= self._ran_until + LAST_WORDS_US
        awaited = self.membership.state.replay.waits_since is not None
        return awaited or any(worker.runs for worker in self.workers.values())

    def _machine(self, rank: int, weight: int, incarnation: int = 0) -> SimulatedMachine:
        return (SimulatedPushedMachine if self.scenario.pushes else SimulatedMachine)(self, rank, weight, incarnation)

    def begin(self, worker: SimulatedMachine) -> None:
        """Begin a worker's script."""
        worker.life = (
            PushedScript(worker) if isinstance(worker, SimulatedPushedMachine) else SimulatedScript(worker)
        ).run()
        self.later(0, partial(self.advance, worker))

    def damages(self) -> bool:
        """Return whether what is sent to a newcomer now is damaged."""
        return self._damages.random() < self.scenario.damaged_share

    def later(self, after_us: int, happen: Callable[[], None]) -> None:
        """Call ``happen`` in ``after_us`` microseconds."""
        heappush(self._agenda, (self.now + after_us, next(self._ticket), happen))

    def gone(self) -> set[int]:
        """Return the ranks that are lost, have left (even if their scripts go on), or are not back yet."""
        lost, joining = self.membership.lost, self._joining
        return self._departed | {
            rank
            for rank, worker in self.workers.items()
            if worker.control_view.worker in lost | joining or worker.reason == LEAVE or worker.control_view.outside
        }

    @property
    def lost_seats(self) -> set[Seat]:
        return {self.workers[rank].seat for rank in self.gone()}

    @property
    def homeless(self) -> set[int]:
        """The replicas with an end whose iterator does not stand at its replica's place."""
        return {
            worker.seat.replica
            for worker in self.workers.values()
            if worker.iterator_data is not None and not worker.iterator_data.in_place
        }

    def note_departures(self) -> None:
        """Record which running workers are no members any more, and which have no work yet, until the job fails."""
        ended = self.membership.ended
        if ended is None or not ended.failed:
            joining = self.membership.state.joining
            self._joining = {each.worker for each in self.membership.roster if joining.get(each.worker) is not None}
        if self.membership.started and not (ended and ended.failed):
            members = self.membership.roster.workers
            self._departed |= {
                rank
                for rank, worker in self.workers.items()
                if worker.alive
                and worker.runs
                and worker.control_view.worker not in members
                and not worker.control_view.outside
            }

    # --- the coordinator and its lines --------------------------------------------------------------

    def travel(self, line: tuple, happen: Callable[[], None]) -> None:
        """Call ``happen`` at the other end of ``line`` when a message gets there."""
        self.later(self.lines.arrival(line, self.now) - self.now, happen)

    def choose(self) -> tuple[int, ...] | None:
        """Return the boundaries to log from the checkpoint on that is durable now; None: as before."""
        choices = self.scenario.log_choices
        if not choices:
            return None
        self.chosen.append(choices[min(len(self.chosen), len(choices) - 1)])
        return self.chosen[-1]

    def tell_coordinator(self, rank: int, message: object, by: str = WORKER) -> None:
        """Send a message from ``rank`` to the coordinator. ``by``: on whose connection."""
        if not self.coordination.reaches(rank):
            return
        worker = self.workers[rank].control_view.worker
        self.coordination.say(rank, message, by, worker)
        for line, word in self.confusion.beside(worker, message, self.membership, self.now) if by != SECOND else ():
            self.later(self.confusion.delay(), partial(self.coordination.say, rank, word, line, worker))

    def say_at_once(self, rank: int, message: Post | ReadBoard) -> None:
        """Send a message about a board."""
        if self.coordination.reaches(rank):
            self.coordination.say_at_once(rank, message)

    def heard(self, rank: int, message: object, lost: bool) -> None:
        """Record that the coordinator hears ``message``. ``lost``: its worker is lost for the coordinator."""
        self.exercised.said(message, self.membership)
        self.watcher.heard(rank, message)
        if isinstance(message, Unreplayable):
            self.watcher.came_upon(self, message)
        if isinstance(message, Logged) and not lost:
            self.logged[message.worker] = message.step

    def tell(self, events: list[Event]) -> None:
        """Record ``events`` for the user."""
        self.events += [(self.now, event) for event in events]
        back = sum(event.kind == "rejoined" for event in events)
        self.exercised[ProtocolRule.SEAT_RETURNED] += back * (self.scenario.shards > 1)
        self.exercised[ProtocolRule.WHOLE_RETURNED] += back * (self.scenario.unit == "replica")
        self.exercised[ProtocolRule.PUSHED_RETURNED] += back * self.scenario.pushes

    def deliver(self, worker: SimulatedMachine, message: object) -> None:
        """Hand a message of the coordinator to a worker."""
        if worker.alive and isinstance(message, Generation) and self._is_without(worker, message):
            self.kill(worker.rank)  # as a real worker does itself, before it does anything else
        elif worker.alive:
            self.exercised.delivered(message, worker.control_view, worker.store)
            worker.control_view.take(End(0, message.reason, True) if isinstance(message, Fence) else message)
            for old in self.confusion.again(worker.rank, message, self.now):
                worker.control_view.take(old)
            self.wake(worker)

    @staticmethod
    def _is_without(worker: SimulatedMachine, generation: Generation) -> bool:
        """Return whether the others go on without a worker that was a newcomer and entered too late."""
        view = worker.control_view
        outside = view.worker not in generation.roster.workers and not generation.from_step
        return outside and view.incarnation > 0 and not view.outside and not view.has_left(generation)

    def kill_fenced(self, fenced: WorkerId) -> None:
        """Kill a fenced worker, as its supervisor does."""
        self._fenced.add(fenced)
        if self.workers[fenced.rank].control_view.worker == fenced:
            self.kill(fenced.rank)

    def _send_heartbeats(self) -> None:
        """Send the heartbeats of every worker and its supervisor."""
        for rank, worker in self.workers.items():
            if worker.alive:
                process = worker.control_view.incarnation
                alive = SupervisorHeartbeat(rank, worker.stopped, worker.cpu_s, incarnation=process)
                self.tell_coordinator(rank, alive, SUPERVISOR)
                if not worker.stopped and worker.runs:
                    beat = Heartbeat(rank, self.now, worker.done, worker.at, worker.step, incarnation=process)
                    self.tell_coordinator(rank, beat)
        self.later(HEARTBEAT_US * (1 + self.scenario.takes_over), self._send_heartbeats)

    # --- data ---------------------------------------------------------------------------------------

    def send(self, source: int, target: int, datum: Datum, value: Any, valid_from: int) -> None:
        """Send data between ranks, unless a trouble loses it. ``valid_from``: the generation since which it counts."""
        kind, until, delay = self.links.get((source, target), ("", 0, 0))
        self.exercised[ProtocolRule.SWALLOWED] += self.now < until and kind == "swallow"
        if (
            (self.now < until and kind in ("drop", "swallow"))
            or (source in self.cut) != (target in self.cut)
            or target in self.deafened
        ):
            return
        number = next(self._ticket)
        self._under_way[number] = source, target, partial(self._arrive, source, target, datum, value, valid_from)
        arrive = partial(self._end_of_way, number)
        self.travel(
            (DATA, source, target), partial(self.later, delay, arrive) if self.now < until and delay else arrive
        )

    def tell_worker(self, source: int, address: str, word: Any) -> None:
        """Send a message of a replay to the worker at ``address``, unless a trouble loses it."""
        target = rank_at(address)
        kind, until, delay = self.links.get((source, target), ("", 0, 0))
        lost = self.now < until and kind in ("drop", "swallow")
        if lost or (source in self.cut) != (target in self.cut) or target in self.deafened:
            return
        hear = partial(self._hear_of_replay, self.workers[target], address, word)
        late = self.now < until and delay
        self.travel((SHARES, source, target), partial(self.later, delay, hear) if late else hear)

    def _hear_of_replay(self, target: SimulatedMachine, address: str, word: Any) -> None:
        if target.alive and target.address == address:
            target.hear(word)
            self.wake(target)

    def tell_seat(self, source: SimulatedMachine, word: Word) -> None:
        """Send a message of one worker to all others that hold its seat."""
        for rank in self._together(source.rank):
            if rank != source.rank and (rank in self.cut) == (source.rank in self.cut):
                target = self.workers[rank]
                arrival = self._in_seats.arrival((source.rank, rank), self.now)
                self.later(arrival - self.now, partial(self._hear_in_seat, source, target, word))

    def _together(self, rank: int) -> range:
        """Return the ranks that hold one seat with ``rank``, itself included."""
        first = rank - rank % self.scenario.shards
        return range(first, first + self.scenario.shards)

    def _hear_in_seat(self, source: SimulatedMachine, target: SimulatedMachine, word: Word) -> None:
        if source.alive and target.alive:
            target.hear_in_seat(source.held.shard, word)
            self.wake(target)

    def _end_of_way(self, number: int) -> None:
        if number in self._under_way:  # it may have been delivered early
            self._under_way.pop(number)[-1]()

    def hurry(self, target: int, live: set[int]) -> None:
        """Deliver at once what ranks other than ``live`` have sent to ``target``, except over a cut line."""
        for number, (source, taker, _) in list(self._under_way.items()):
            if taker == target and source not in live and (source in self.cut) == (target in self.cut):
                self._end_of_way(number)

    def _arrive(self, source: int, target: int, datum: Datum, value: Any, valid_from: int) -> None:
        worker = self.workers[target]
        if worker.alive and source not in worker.unheard:
            if datum.step <= worker.control_view.committed or valid_from < worker.store.valid_from:
                self.exercised[
                    ProtocolRule.OLD_STEP
                    if datum.step <= worker.control_view.committed
                    else ProtocolRule.OLD_GENERATION
                ] += 1
            self.watcher.arrived(worker, datum)
            worker.deliver(datum, value, valid_from)
            self.wake(worker)

    # --- troubles -----------------------------------------------------------------------------------

    def strike(self, trouble: Trouble) -> None:
        """Let a trouble strike now."""
        ranks = [self.rank_of[seat] for seat in trouble.seats]
        for rank in ranks:
            self.hit(trouble.kind, rank)
        match trouble.kind:
            case "kill":
                for rank in ranks:
                    self.kill(rank)
            case "stop" | "unfenced" | "stuck" | "slow" | "rude" | "vanish":
                for rank in ranks:
                    self.trouble(rank, trouble)
            case "drop" | "delay" | "swallow":
                lasts, delay = (
                    (min(trouble.for_us, DELAYING_US), trouble.for_us)
                    if trouble.kind == "delay"
                    else (trouble.for_us, 0)
                )
                assert trouble.peer is not None, f"{trouble} is between nobody"
                self.links[ranks[0], self.rank_of[trouble.peer]] = (trouble.kind, self.now + lasts, delay)
            case "deafened" | "walled":
                self.deafened |= dict.fromkeys(ranks, trouble.kind == "deafened")
            case "cut":
                self._cut_off([rank for struck in ranks for rank in self._together(struck)])
            case "host":
                for rank in ranks:
                    self.lose_host(rank)
            case "stall":
                self.coordination.stall(trouble.for_us)
            case kind if kind in TAKEOVERS:
                self.coordination.strike(trouble)
            case "mute" | "deaf":
                self.lines.hold(
                    (WORKER, "there" if trouble.kind == "mute" else "back", ranks[0]), self.now + trouble.for_us
                )
            case "again":
                for rank in ranks:
                    self._come_again(rank)
            case "leave" | "end" | "finish":
                for rank in ranks:
                    self._ask(trouble.kind, rank)
            case "confused":
                for rank in ranks:
                    self.confusion.begin(rank, self.now + trouble.for_us)

    def _ask(self, kind: str, rank: int) -> None:
        """Send SIGTERM to a worker or its supervisor, or have a worker ask for everybody's end."""
        worker = self.workers[rank]
        if kind == "end":
            self.tell_coordinator(rank, Terminate(rank, "a supervisor got SIGTERM"), SUPERVISOR)
        elif worker.alive and worker.runs and not worker.stopped:
            self.tell_coordinator(rank, Leaving(rank, "SIGTERM", all=kind == "finish"))

    def hit(self, kind: str, rank: int) -> None:
        """Count that a trouble has struck a worker, for the table of tried troubles."""
        worker = self.workers[rank]
        if worker.current is not None and worker.alive:
            self.hits[kind, worker.current.op] += 1

    def trouble(self, rank: int, trouble: Trouble) -> None:
        """Make the worker of ``rank`` slow, stuck, rude, stopped or about to vanish from now on."""
        worker = self.workers[rank]
        if trouble.kind == "slow":
            worker.percent = trouble.percent
        elif trouble.kind == "stuck":
            worker.stuck = True
        elif trouble.kind == "rude":
            worker.rude = True
        elif trouble.kind == "vanish":
            worker.vanishes = 1 if trouble.at_us else self.scenario.steps
        else:
            worker.stopped, worker.unfenced = True, trouble.kind == "unfenced"
            self.later(trouble.for_us, partial(self._wake_up, rank))

    def _wake_up(self, rank: int) -> None:
        """Wake a stopped worker. If it was given up, it may report broken connections before it reads why."""
        if self.workers[rank].alive and self.workers[rank].control_view.worker in self.membership.lost:
            self.workers[rank].send(Fatal(rank, "nobody answers"))
        self.workers[rank].stopped = False
        self.wake(self.workers[rank])

    def kill(self, rank: int) -> None:
        """Kill the worker of ``rank``. Its connection and its supervisor inform the coordinator."""
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.alive, worker.stopped = False, False
        self.touch_sums(rank)
        if self.coordination.reaches(rank):
            process = worker.control_view.worker
            self.later(
                self.random.choice((0, self.random.randrange(DETECTION_US // 4))),
                partial(self.coordination.disconnect, rank, WORKER, process),
            )
            exited = Exited(rank, worker.code, self.now / 1e6, incarnation=process.incarnation)
            line = SUPERVISOR if worker.code else WORKER  # after its last messages (runtime/control/coordinator.py)
            self.later(self.random.randrange(DETECTION_US), partial(self.tell_coordinator, rank, exited, line))

    def restart(self, message: Restart) -> None:
        """Start a process in place of a dead one, as its supervisor does."""
        before = self.workers[message.rank]
        if before.control_view.incarnation >= message.incarnation or not self.coordination.reaches(message.rank):
            return
        as_one = self.scenario.shards > 1 or self.scenario.unit == "replica"
        if as_one and message.worker in self._fenced:  # it went with another one of its unit, which has died
            return
        self._departed.discard(message.rank)
        worker = self._machine(message.rank, 0, message.incarnation)
        self.returned.append(before)
        self.watcher.replaced(before)
        self.workers[message.rank] = worker
        if self.coordination.begins(worker):
            self.begin(worker)

    def _come_again(self, rank: int) -> None:
        """Start a second process of a rank, which nobody has asked for."""
        second = self.workers[rank].ready(incarnation=SECOND_PROCESS)
        for message in (
            second,
            Heartbeat(rank, 1, 0, Activity(WAITS, "the start"), incarnation=SECOND_PROCESS),
            Fatal(rank, "nobody answers", incarnation=SECOND_PROCESS),
        ):
            self.tell_coordinator(rank, message, SECOND)
        self.coordination.disconnect(rank, SECOND, second.worker)

    def _cut_off(self, ranks: list[int]) -> None:
        self.cut |= set(ranks)
        for rank in ranks:
            self.touch_sums(rank)
            self.later(DETECTION_US, partial(self.coordination.disconnect, rank))
            self.later(DETECTION_US, partial(self._lose_coordinator, rank))

    def lose_host(self, rank: int) -> None:
        """Lose the host of ``rank`` with all that is on it; nobody reports how its worker has ended."""
        self.lost_hosts.add(rank)
        self.cut.add(rank)
        self.kill(rank)
        process = self.workers[rank].control_view.worker
        self.later(DETECTION_US, partial(self.coordination.disconnect, rank, WORKER, process))
        self.later(DETECTION_US, partial(self.coordination.lose_supervisor, rank))
        for log in self.logs if self.scenario.logs_apart else ():
            if log.worker.rank == rank:
                self.taken |= dict.fromkeys(log.taken(), self.now)

    def _lose_coordinator(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.alive and worker.control_view.lose_coordinator():
            self.wake(worker)

    def touch_sums(self, rank: int) -> None:
        """Mark all sums that the worker of ``rank`` takes part in: they may be torn."""
        for sum_ in self.sums.values():
            if rank in sum_.members:
                sum_.touched = True

    # --- the clock ----------------------------------------------------------------------------------

    def advance(self, worker: SimulatedMachine) -> None:
        """Let a worker go on until it waits, spends time, or ends."""
        if not worker.alive or not worker.runs:
            return
        if worker.stopped:
            worker.waiting = True  # until it wakes up
            return
        worker.waiting = False
        try:
            wanted = next(worker.life)
        except StopIteration:
            worker.runs = False
            return
        except Died:
            self.kill(worker.rank)
            return
        if isinstance(wanted, int):
            worker.busy = True
            self.later(wanted, partial(self._finish, worker))
        else:
            worker.waits_for, worker.waiting = wanted, True

    def _finish(self, worker: SimulatedMachine) -> None:
        worker.busy = False
        self.advance(worker)

    def wake(self, worker: SimulatedMachine) -> None:
        """Let a waiting worker go on: something has come for it."""
        if worker.waiting and not worker.stopped and not worker.busy:
            worker.waiting = False
            self.later(0, partial(self.advance, worker))


def redone_share(cluster: Cluster) -> float:
    """Return the compute instructions that ran more than once, as a share of those needed."""
    shape = cluster.scenario.shape
    seen = {span.instruction for span in cluster.spans if span.instruction.op in COMPUTE}
    ran = sum(span.instruction.op in COMPUTE for span in cluster.spans)
    return (ran - len(seen)) / max(1, len(seen)) if shape.batch else 0.0
