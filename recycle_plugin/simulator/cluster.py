"""A whole job in virtual time, coordinator and all, in which only clock, network and tensors are simulated.

Every worker runs ``core.loop`` over ``core.executor``; its messages go through ``core.protocol`` objects to the one
``core.membership``, whose answers come back over lines that take time, stop, or break.  Weights are exact numbers
(``simulator.exact``).  What may go wrong is in :class:`Trouble`; what must hold is checked while it runs and at the end
(``simulator.checks``).  The same seed gives the same events.

Unlike ``simulator.virtual``, which runs one membership at a time and answers how long things take, workers here learn of
changes one by one, at any instant, so this answers whether anything can break.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Callable, Iterator

from recycle_plugin import planner
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.dataflow import Datum, consumes, requires
from recycle_plugin.core.executor import Span, execute
from recycle_plugin.core.faults import Fault, FaultScript
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op
from recycle_plugin.core.lineage import Rest
from recycle_plugin.core.line import JobEnded, Line
from recycle_plugin.core.loop import Loop, Program
from recycle_plugin.core.membership import SUPERVISORS, WORKERS, Event, Membership, Output
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.protocol import Beat, Contribution, End, Exited, Fence, Left, Member, Missing, Pulse, Ready
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.topology import ClusterView, Topology
from recycle_plugin.core.watch import COMPUTES, TICK_S, WAITS
from recycle_plugin.simulator.exact import PRIME, compute

MILLISECOND = 1000
CONTROL_US = 300  # a control message's way
DATA_US = 500  # a boundary tensor's
DETECTION_US = 20 * MILLISECOND
BEAT_US = 200 * MILLISECOND
RESEND_US = 1500 * MILLISECOND  # a datum's wait before its receiver says that it misses it
PROGRESS_S, IDLE_S, REGROUP_S = 1.0, 20.0, 30.0


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong ``at_us``, for ``for_us`` where it passes.

    ``kind``: kill; stop (SIGSTOP; wakes up again unless it was given up and fenced), unfenced (the same, and its supervisor
    can't kill it), stuck (an instruction never ends), slow (takes ``percent``); drop, delay (what goes from ``seat`` to
    ``peer`` is lost, or comes late); cut (``seats`` are cut off from all others).
    """

    kind: str
    at_us: int
    seats: tuple[Seat, ...]
    peer: Seat | None = None
    for_us: int = 0
    percent: int = 100

    def __str__(self) -> str:
        names = "+".join(map(str, self.seats)) + (f">{self.peer}" if self.peer else "")
        return f"{self.kind} {names} at {self.at_us / 1000:g} ms" + (f" for {self.for_us / 1000:g} ms" if self.for_us else "")


@dataclass(frozen=True)
class Scenario:
    """A job and its troubles.  ``faults``: kills and stops at named instructions and points.  ``torn``: seeds who is left
    without the result when a peer dies in a REDUCE; ``budget``: boundary tensors that a worker may keep once sent."""

    shape: Topology
    costs: CostModel
    policy: Policy
    steps: int
    troubles: tuple[Trouble, ...] = ()
    faults: tuple[Fault, ...] = ()
    torn: int = 0
    budget: int | None = None
    torn_share: float = 0.5


class Died(BaseException):
    """Ends the execution of a worker that is dead."""


@dataclass
class Sum:
    """A REDUCE under way: who takes part, what each has brought, and whether all are there."""

    members: frozenset[int]
    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    touched: bool = False  # a member has died or was cut off before everybody had the result


class Cluster:
    """Runs one scenario; ``watcher`` is told what it may want to check (``simulator.checks``)."""

    def __init__(self, scenario: Scenario, weights: tuple[int, ...], watcher: Any) -> None:
        self.scenario, self.watcher, self.random = scenario, watcher, Random(scenario.torn)
        self.membership = Membership(len(scenario.shape.seats))
        self.now, self._ticket = 0, count()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self.workers = {rank: Worker(self, rank, seat, weights[seat.stage]) for rank, seat in enumerate(scenario.shape.seats)}
        self.rank_of = {seat: rank for rank, seat in enumerate(scenario.shape.seats)}
        self.sums: dict[tuple[int, int, int], Sum] = {}
        self.events: list[tuple[int, Event]] = []
        self.spans: list[Span] = []
        self.links: dict[tuple[int, int], tuple[str, int, int]] = {}  # kind, until, delay
        self.cut: set[int] = set()
        self.hits: Counter[tuple[str, Op]] = Counter()  # kind of trouble, and what the worker was at
        self.over = False
        self._watched = -1
        self.planner = Planner(scenario.costs, scenario.policy)

    def run(self, until_us: int) -> None:
        """Until nobody has anything left to do, or ``until_us``."""
        for rank, worker in self.workers.items():
            worker.life = worker.live()
            self.later(0, partial(self.advance, rank))
        for trouble in self.scenario.troubles:
            self.later(trouble.at_us, partial(self._strike, trouble))
        self.later(0, self._tick)
        self.later(0, self._beat)
        while self._agenda and self._agenda[0][0] <= until_us and any(worker.runs for worker in self.workers.values()):
            self.now, _, happen = heappop(self._agenda)
            happen()

    def later(self, after_us: int, happen: Callable[[], None]) -> None:
        heappush(self._agenda, (self.now + after_us, next(self._ticket), happen))

    # --- the coordinator and its lines --------------------------------------------------------------

    def tell_coordinator(self, rank: int, message: object) -> None:
        if rank not in self.cut:
            self.later(CONTROL_US, lambda: self._act(self.membership.receive(message, self.now / 1e6)))

    def _act(self, output: Output) -> None:
        self.events += [(self.now, event) for event in output.events]
        for whom, message in output.messages:
            if whom == SUPERVISORS:
                self._tell_supervisors(message)
                continue
            for rank in self.workers if whom == WORKERS else (whom,):
                if rank not in self.cut:
                    self.later(CONTROL_US, partial(self._deliver, rank, message))
        self.watcher.committed(self)
        number = self.membership.regrouping
        if number is not None and number != self._watched:
            self._watched = number
            self.later(int(REGROUP_S * 1e6), partial(self._overdue, number))

    def _overdue(self, number: int) -> None:
        if self.membership.regrouping == number:
            self._act(self.membership.regroup_overdue(REGROUP_S))

    def _deliver(self, rank: int, message: object) -> None:
        worker = self.workers[rank]
        if worker.alive:
            worker.line.take(End(0, message.reason, True) if isinstance(message, Fence) else message)
            self.wake(rank)

    def _tell_supervisors(self, message: object) -> None:
        if isinstance(message, Fence) and message.rank not in self.cut and not self.workers[message.rank].unfenced:
            self.later(CONTROL_US, partial(self.kill, message.rank))

    def _tick(self) -> None:
        self._act(self.membership.tick(self.now / 1e6))
        self.later(int(TICK_S * 1e6), self._tick)

    def _beat(self) -> None:
        """What a worker's own thread and its supervisor say of it."""
        for rank, worker in self.workers.items():
            if worker.alive:
                self.tell_coordinator(rank, Pulse(rank, worker.stopped))
                if not worker.stopped and worker.runs:
                    self.tell_coordinator(rank, Beat(rank, self.now, worker.done, *worker.at))
        self.later(BEAT_US, self._beat)

    # --- data ---------------------------------------------------------------------------------------

    def send(self, source: int, target: int, datum: Datum, value: Any) -> None:
        kind, until, delay = self.links.get((source, target), ("", 0, 0))
        if self.now < until and kind == "drop" or (source in self.cut) != (target in self.cut):
            return
        self.later(DATA_US + (delay if self.now < until else 0), partial(self._arrive, target, datum, value))

    def _arrive(self, target: int, datum: Datum, value: Any) -> None:
        worker = self.workers[target]
        if worker.alive and datum.step > worker.line.committed:
            worker.have[datum] = value
            self.wake(target)

    # --- troubles -----------------------------------------------------------------------------------

    def _strike(self, trouble: Trouble) -> None:
        ranks = [self.rank_of[seat] for seat in trouble.seats]
        for rank in ranks:
            self.hit(trouble.kind, rank)
        match trouble.kind:
            case "kill":
                for rank in ranks:
                    self.kill(rank)
            case "stop" | "unfenced" | "stuck" | "slow":
                for rank in ranks:
                    self.trouble(rank, trouble)
            case "drop" | "delay":
                delay = trouble.for_us if trouble.kind == "delay" else 0
                self.links[ranks[0], self.rank_of[trouble.peer]] = (trouble.kind, self.now + trouble.for_us, delay)
            case "cut":
                self._cut_off(ranks)

    def hit(self, kind: str, rank: int) -> None:
        """Count it, for the table of what has been tried."""
        if self.workers[rank].current is not None and self.workers[rank].alive:
            self.hits[kind, self.workers[rank].current.op] += 1

    def trouble(self, rank: int, trouble: Trouble) -> None:
        worker = self.workers[rank]
        if trouble.kind == "slow":
            worker.percent = trouble.percent
        elif trouble.kind == "stuck":
            worker.stuck = True
        else:
            worker.stopped, worker.unfenced = True, trouble.kind == "unfenced"
            self.later(trouble.for_us, partial(self._wake_up, rank))

    def _wake_up(self, rank: int) -> None:
        self.workers[rank].stopped = False
        self.wake(rank)

    def kill(self, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.alive, worker.stopped = False, False
        self._touch_sums(rank)
        at = self.now / 1e6
        if rank not in self.cut:
            self.later(DETECTION_US // 2, lambda: self._act(self.membership.connection_lost(rank, self.now / 1e6)))
            self.later(DETECTION_US, lambda: self._act(self.membership.receive(Exited(rank, -9, at), self.now / 1e6)))

    def _cut_off(self, ranks: list[int]) -> None:
        self.cut |= set(ranks)
        for rank in ranks:
            self._touch_sums(rank)
            self.later(DETECTION_US, lambda rank=rank: self._act(self.membership.connection_lost(rank, self.now / 1e6)))
            self.later(DETECTION_US, partial(self._lose_coordinator, rank))

    def _lose_coordinator(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.alive and worker.line.end is None:
            worker.line.end = End(0, "the coordinator's host is gone", failed=True)
            self.wake(rank)

    def _touch_sums(self, rank: int) -> None:
        for sum_ in self.sums.values():
            if rank in sum_.members:
                sum_.touched = True

    # --- the clock ----------------------------------------------------------------------------------

    def advance(self, rank: int) -> None:
        worker = self.workers[rank]
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
            self.kill(rank)
            return
        if isinstance(wanted, int):
            worker.busy = True
            self.later(wanted, partial(self._finish, rank))
        else:
            worker.waits_for, worker.waiting = wanted, True

    def _finish(self, rank: int) -> None:
        self.workers[rank].busy = False
        self.advance(rank)

    def wake(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.waiting and not worker.stopped and not worker.busy:
            worker.waiting = False
            self.later(0, partial(self.advance, rank))


class Worker:
    """One worker: what ``core.loop`` calls port and replica, and ``core.executor`` world."""

    def __init__(self, cluster: Cluster, rank: int, seat: Seat, weight: int) -> None:
        self.cluster, self.rank, self.seat = cluster, rank, seat
        self.line = Line(rank)
        self.machine = StepMachine(0)
        self.have: dict[Datum, Any] = {Datum("params", seat.stage, None, 1): weight}
        self.script = FaultScript(cluster.scenario.faults, seat)
        self.alive = self.runs = True
        self.stopped = self.unfenced = self.stuck = self.waiting = self.busy = False
        self.percent, self.done, self.at = 100, 0, (WAITS, "the start")
        self.waits_for = ""
        self.current: Instruction | None = None  # the one that it is at
        self.losses: dict[int, dict] = {}  # as the training script gets them, by step
        self.reason: str | None = None  # of its end before the last step
        self.life: Iterator[Any]
        self.program: Program | None = None
        self._before: Any = None
        self._sent: dict[Datum, None] = {}
        self._own_losses: dict[int, dict[str, int]] = defaultdict(dict)
        self.peak_kept = 0

    def live(self) -> Iterator[Any]:
        """The training script."""
        scenario = self.cluster.scenario
        self.loop = Loop(self, self, self.cluster.planner, scenario.shape, self.seat, self.machine)
        self.send(Ready(Member(self.rank, self.seat, str(self.rank), f"host{self.rank}"), 0, _job(scenario)))
        try:
            yield from self.loop.start()
            for step in range(1, scenario.steps + 1):
                self.losses[step] = yield from self.loop.train(step)
            yield from self.loop.settle()
        except JobEnded as end:
            self.reason = str(end)
        self.send(Left(self.rank))

    # core.loop.Port

    def wait(self, what: Any, ready: Callable[[], Any], interruptible: bool = True) -> Iterator[Any]:
        while True:
            self.line.check_end()
            if interruptible:
                self.line.check()
            value = ready()
            if value is not None:
                return value
            self.at = (WAITS, what if isinstance(what, str) else what())
            yield self.at[1]

    def send(self, message: object) -> None:
        self.cluster.tell_coordinator(self.rank, message)

    def clock(self) -> float:
        return self.cluster.now / 1e6

    def reach(self, when: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        """A point of recovery (one argument), or before and after an instruction: where named faults strike."""
        fault = self.script.due("at", when) if instruction is None else self.script.due(when, str(instruction))
        if fault is not None:
            self.cluster.hit(fault.kind, self.rank)
        if fault is not None and fault.kind == "kill":
            raise Died
        if fault is not None:
            self.cluster.trouble(self.rank, Trouble("stop", self.cluster.now, (self.seat,), for_us=5_000 * MILLISECOND))

    # core.loop.Replica

    def execute(self, program: Program) -> Iterator[Any]:
        self.program = program
        self._forget_committed()
        if program.resumed:
            self._say_losses(program.step)
        yield from execute(self.seat, program.instructions, self)

    def held(self) -> set[Datum]:
        self._forget_committed()
        self._sent.clear()  # peers plan with what is here: it stays until it is sent once more
        return {datum for datum in self.have if datum.kind != "params"}

    def undo(self, step: int) -> None:
        del self.have[Datum("params", self.seat.stage, None, step + 1)]
        self.have[Datum("params", self.seat.stage, None, step)] = self._before
        for datum in [datum for datum in self.have if datum.kind == "stash" and datum.step > step]:
            del self.have[datum]

    def leave(self, members: Any) -> None:
        pass

    # core.executor.World

    def check_generation(self) -> None:
        self.line.check()

    def now_us(self) -> int:
        return self.cluster.now

    def await_inputs(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        self.current = instruction
        if instruction.op in RECEIVES:
            (datum,) = requires(instruction, self.cluster.scenario.shape.stages)
            self.cluster.later(RESEND_US, partial(self._complain, self.line.number, datum, instruction.peer))
            yield from self.wait(lambda: f"{datum} from seat {instruction.peer}", lambda: True if datum in self.have else None)
        elif instruction.op is Op.STEP and not self.machine.may_apply(instruction.step):
            yield from self.wait(f"the commit of step {instruction.step - 1}", lambda: self.line.is_committed(instruction.step - 1))
            self.machine.commit(instruction.step - 1)
        yield from ()

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        self.at = (COMPUTES, str(instruction))
        scenario, stages = self.cluster.scenario, self.cluster.scenario.shape.stages
        if instruction.op is Op.REDUCE:
            yield from self._reduce(instruction)
            return
        spent = scenario.costs.of(instruction.op, self.seat.stage) * self.percent // 100
        if spent:
            yield spent
        if self.stuck:
            yield from self._hang()
        if instruction.op in SENDS:
            (datum,) = requires(instruction, stages)
            self.cluster.send(self.rank, self.cluster.rank_of[instruction.peer], datum, self.have[datum])
            self._note_sent(datum)
        elif instruction.op not in RECEIVES:
            self._compute(instruction, stages)

    def record(self, span: Span) -> None:
        self.done += 1
        self.cluster.spans.append(span)

    def _compute(self, instruction: Instruction, stages: int) -> None:
        bare, before = instruction in self.program.bare, self.machine.stepped
        made = compute(instruction, self.have, stages)
        if instruction.op is Op.STEP:
            self._before = self.have.pop(Datum("params", self.seat.stage, None, instruction.step))
            assert before == instruction.step - 1
        for datum in consumes(instruction, stages):
            self.have.pop(datum, None)
        self.have |= {datum: value for datum, value in made.items() if not (bare and datum.kind in ("stash", "inner"))}
        self.cluster.watcher.computed(self, instruction, bare)
        if instruction.op is Op.F and self.seat.stage == stages - 1:
            self._own_losses[instruction.step][str(instruction.micro_batch)] = made[Datum("stash", self.seat.stage, instruction.micro_batch, instruction.step)][1]
            if instruction == next(one for one in reversed(self.program.instructions) if one.op is Op.F):
                self._say_losses(instruction.step)
        elif instruction.op is Op.STEP:
            self.loop.applied(instruction.step)

    def _say_losses(self, step: int) -> None:
        if self._own_losses[step]:
            expected = len(self.cluster.scenario.shape.batch)
            self.send(Contribution(self.rank, self.line.number, step, "loss", dict(self._own_losses[step]), expected))

    def _reduce(self, instruction: Instruction) -> Iterator[Any]:
        """As a collective does: nobody has the result before all have come, and a death leaves some with it and some without."""
        stage, step = self.seat.stage, instruction.step
        reduced = Datum("reduced", stage, None, step)
        own = {datum: value for datum, value in self.have.items() if datum.kind == "wgrad" and datum.step == step}
        members = frozenset(member.rank for member in self.line.generation.members if member.seat.stage == stage)
        sum_ = self.cluster.sums.setdefault((self.line.number, stage, step), Sum(members))
        whole = self.program.holder == self.seat
        sum_.brought[self.rank] = self.have[reduced] if whole else own if self.program.holder is None else None
        if set(sum_.brought) == members:
            sum_.done = True
            for rank in members:
                self.cluster.wake(rank)
        yield from self.wait(lambda: f"the sum of stage {stage}, step {step}", lambda: sum_.done or None)
        self.at = (COMPUTES, str(instruction))
        yield self.cluster.scenario.costs.of(Op.REDUCE, stage) + 1
        if sum_.touched and self.cluster.random.random() < self.cluster.scenario.torn_share:
            yield from self.wait("news of a lost worker", lambda: None)
        if reduced in self.have:
            return
        if self.program.holder is not None:
            self.have[reduced] = sum_.brought[self.cluster.rank_of[self.program.holder]]
        else:
            self.have[reduced] = sum(value for part in sum_.brought.values() for value in part.values()) % PRIME
            self.cluster.watcher.summed(self, step, list(sum_.brought.values()))
        for datum in own:
            del self.have[datum]

    def _hang(self) -> Iterator[Any]:
        while True:
            yield 10**9

    def _complain(self, generation: int, datum: Datum, source: Seat) -> None:
        """Where the same wait lasts too long."""
        waits = self.alive and self.waiting and self.line.number == generation and self.at == (WAITS, f"{datum} from seat {source}")
        if waits and self.line.interruption() is None:
            self.cluster.watcher.missed(self, datum, source)
            self.send(Missing(self.rank, generation, str(datum), str(source)))
            self.cluster.later(RESEND_US, partial(self._complain, generation, datum, source))

    def _note_sent(self, datum: Datum) -> None:
        self._sent[datum] = None
        self._sent = {datum: None for datum in self._sent if datum in self.have}
        budget = self.cluster.scenario.budget
        while budget is not None and len(self._sent) > budget:
            first = next(iter(self._sent))
            del self._sent[first], self.have[first]
        self.peak_kept = max(self.peak_kept, len(self._sent))

    def _forget_committed(self) -> None:
        for datum in [datum for datum in self.have if datum.kind != "params" and datum.step <= self.line.committed]:
            del self.have[datum]


class Planner:
    """``core.loop.Planner``; what several workers ask for alike is worked out once."""

    def __init__(self, costs: CostModel, policy: Policy) -> None:
        self._costs, self._policy = costs, policy
        self._plans: dict[frozenset[Seat], Plan] = {}

    def plan(self, view: ClusterView, slowness: object) -> Plan:
        """``slowness``: of nobody, since nobody measures."""
        if view.live not in self._plans:
            self._plans[view.live] = planner.plan(view, self._costs, self._policy)
        return self._plans[view.live]

    def lower(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        return planner.lower(plan, seat, step)

    def arrange(self, rest: Rest, plan: Plan, seat: Seat) -> tuple[Instruction, ...]:
        return planner.arrange(rest, plan, seat)


def _job(scenario: Scenario) -> dict:
    shape = scenario.shape
    return {
        "replicas": shape.replicas, "stages": shape.stages, "micro_batches": shape.micro_batches, "run_dir": "", "regroup_timeout_s": REGROUP_S,
        "strict_placement": False, "clipping": 0.0, "stagger_optimizer": scenario.policy.stagger_optimizer,
        "progress_timeout_s": PROGRESS_S, "idle_timeout_s": IDLE_S,
    }  # fmt: skip


def redone_share(cluster: Cluster) -> float:
    """Compute instructions run more than once, of all that were needed."""
    shape = cluster.scenario.shape
    seen = {span.instruction for span in cluster.spans if span.instruction.op in COMPUTE}
    ran = sum(span.instruction.op in COMPUTE for span in cluster.spans)
    return (ran - len(seen)) / max(1, len(seen)) if shape.batch else 0.0
