"""One worker of a simulated cluster, and what may happen to it: its data, its waits and its sums; the loop is ``core.loop``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Callable, Iterator

from recycle_plugin import planner
from recycle_plugin.core.blocks import Block
from recycle_plugin.core.contributions import LOSS, NORM
from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.dataflow import Datum, consumes, requires
from recycle_plugin.core.executor import Span, execute
from recycle_plugin.core.faults import FaultScript
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.instruction import RECEIVES, SENDS, Instruction, Op
from recycle_plugin.core.lineage import Held, Rest
from recycle_plugin.core.line import JobEnded, Line
from recycle_plugin.core.loop import Loop, Program
from recycle_plugin.core.plan import Plan, Policy
from recycle_plugin.core.protocol import Contribution, Left, Member, Missing, Ready
from recycle_plugin.core.step import StepMachine
from recycle_plugin.core.topology import ClusterView
from recycle_plugin.core.verdict import SHARE, over
from recycle_plugin.core.watch import COMPUTES, WAITS
from recycle_plugin.simulator.exact import added, compute, over_tie, share
from recycle_plugin.simulator.exercised import Rule
from recycle_plugin.simulator.scenario import MILLISECOND, Scenario, Trouble

if TYPE_CHECKING:
    from recycle_plugin.simulator.cluster import Cluster

HANDLING_US = 200  # of a micro-batch that is loaded, or a boundary tensor that is sent: no plan counts it
RESEND_US = 1500 * MILLISECOND  # a datum's wait before its receiver says that it misses it
PROGRESS_S, IDLE_S, REGROUP_S = 1.0, 20.0, 30.0


class Died(BaseException):
    """Ends the execution of a worker that is dead."""


@dataclass
class Sum:
    """A REDUCE or a TIE under way: who takes part, what each has brought, and whether all are there."""

    members: frozenset[int]
    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    touched: bool = False  # a member has died or was cut off before everybody had the result


class Worker:
    """One worker: what ``core.loop`` calls port and replica, and ``core.executor`` world."""

    def __init__(self, cluster: Cluster, rank: int, seat: Seat, weight: int) -> None:
        self.cluster, self.rank, self.seat = cluster, rank, seat
        self.tie = cluster.scenario.shape.tie(seat.stage)
        self.line = Line(rank)
        self.machine = StepMachine(0)
        self.have: dict[Datum, Any] = {Datum("params", seat.stage, None, 1): weight}
        self.script = FaultScript(cluster.scenario.faults, seat)
        self.alive = self.runs = True
        self.stopped = self.unfenced = self.stuck = self.rude = self.waiting = self.busy = False
        self.percent, self.done, self.at = 100, 0, (WAITS, "the start")
        self.waits_for = ""
        self.current: Instruction | None = None  # the one that it is at
        self.losses: dict[int, dict] = {}  # as the training script gets them, by step
        self.reason: str | None = None  # of its end before the last step
        self.life: Iterator[Any]
        self.program: Program | None = None
        self._before: Any = None
        self._written = 0  # how often parameters were, as torch counts versions
        self._graphs: dict[Datum, int] = {}  # by stash, the parameters that it was made with
        self._sums: dict[tuple[int, Block], int] = {}  # of weight gradients, by step
        self._sent: dict[Datum, None] = {}
        self.era, self._eras = 0, {}  # of this worker, and of what has come from others (core.loop.Replica.void)
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
        if self.rude:
            raise Died
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

    def drawn(self) -> dict[str, str]:
        return {}  # its data is addressed by name

    def stand(self, standing: Any) -> None:
        pass

    def undo(self, step: int) -> None:
        self.cluster.exercised[Rule.TAKEN_BACK] += 1
        self._written += 1
        del self.have[Datum("params", self.seat.stage, None, step + 1)]
        self.have[Datum("params", self.seat.stage, None, step)] = self._before
        self._drop_stashes(step)

    def judge(self, step: int, norm: float) -> None:
        self.cluster.exercised[Rule.TWICE_REJECTED] += self._knows_norm(step)
        self.have[Datum("norm", self.seat.stage, None, step)] = norm

    def void(self, after: int, era: int) -> None:
        self.era = era
        self.cluster.watcher.voided(self, after)
        for datum in [datum for datum in self.have if datum.step > after and datum.kind != "params" and self._eras.get(datum, 0) < era]:
            del self.have[datum]
        self._own_losses = defaultdict(dict, {step: losses for step, losses in self._own_losses.items() if step <= after})
        self._sums = {key: total for key, total in self._sums.items() if key[0] <= after}

    def arrive(self, datum: Datum, value: Any, era: int) -> None:
        """A boundary tensor, from a peer in ``era``."""
        if datum.step > self.line.committed and era >= self.era:
            self.have[datum], self._eras[datum] = value, era

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
            self.cluster.exercised[Rule.LATE_COMMIT] += not self.line.is_committed(instruction.step - 1)
            yield from self.wait(f"the commit of step {instruction.step - 1}", lambda: self.line.is_committed(instruction.step - 1))
            self.machine.commit(instruction.step - 1)
        yield from ()

    def perform(self, seat: Seat, instruction: Instruction) -> Iterator[Any]:
        self.at = (COMPUTES, str(instruction))
        scenario, stages = self.cluster.scenario, self.cluster.scenario.shape.stages
        if instruction.op in (Op.REDUCE, Op.TIE):
            yield from self._reduce(instruction) if instruction.op is Op.REDUCE else self._sum_over_tie(instruction)
            return
        if instruction.op is Op.VALIDATE:
            yield from self._validate(instruction.step)
            return
        handling = HANDLING_US if instruction.op in SENDS or instruction.op is Op.LOAD else 0
        spent = (handling + scenario.costs.of(instruction.op, self.seat.stage)) * self.percent // 100
        if spent:
            yield spent
        if self.stuck:
            yield from self._hang()
        if instruction.op in SENDS:
            (datum,) = requires(instruction, stages)
            self.cluster.send(self.rank, self.cluster.rank_of[instruction.peer], datum, self.have[datum], self.era)
            self._note_sent(datum)
        elif instruction.op not in RECEIVES:
            self._compute(instruction, stages)

    def record(self, span: Span) -> None:
        self.done += 1
        self.cluster.spans.append(span)

    def _compute(self, instruction: Instruction, stages: int) -> None:
        bare, before = instruction in self.program.bare, self.machine.stepped
        made = compute(instruction, self.have, stages, bool(self.tie))
        if instruction.op is Op.STEP:
            if self.cluster.scenario.clip and not self.cluster.scenario.policy.together and not self._knows_norm(instruction.step):
                self._say_share(instruction.step, SHARE)
            self._written += 1
            self._before = self.have.pop(Datum("params", self.seat.stage, None, instruction.step))
            self._drop_stashes(instruction.step - 1)  # left by what a later failure has made needless
            assert before == instruction.step - 1
            self.cluster.watcher.applied(self, instruction.step, self._gradient(instruction.step), self.have.get(Datum("norm", self.seat.stage, None, instruction.step)))
        self._differentiate(instruction)
        for datum in consumes(instruction, stages):
            self.have.pop(datum, None)
        self.have |= {datum: value for datum, value in made.items() if not (bare and datum.kind in ("stash", "inner"))}
        self.cluster.watcher.computed(self, instruction, bare)
        if instruction.op in (Op.W, Op.B):
            self._count(instruction, made)
        if instruction.op is Op.F and self.seat.stage == stages - 1:
            self._own_losses[instruction.step][str(instruction.micro_batch)] = made[Datum("stash", self.seat.stage, instruction.micro_batch, instruction.step)][1]
            if instruction == next(one for one in reversed(self.program.instructions) if one.op is Op.F):
                self._say_losses(instruction.step)
        elif instruction.op is Op.STEP:
            self.loop.applied(instruction.step)

    def _drop_stashes(self, after: int) -> None:
        """Parameters change under what was computed for the steps after ``after``."""
        for datum in [datum for datum in self.have if datum.kind == "stash" and datum.step > after]:
            del self.have[datum]

    def _differentiate(self, instruction: Instruction) -> None:
        """A stash refers to the parameters that it was made with: written over, as by a step that is taken back and done again, it is of no use."""
        stash = Datum("stash", self.seat.stage, instruction.micro_batch, instruction.step)
        if instruction.op is Op.F:
            self._graphs[stash] = self._written
        elif instruction.op in (Op.I, Op.B) and self._graphs.pop(stash) != self._written:
            self.cluster.watcher.say(f"seat {self.seat} runs {instruction} through parameters that have changed since its forward")

    def _count(self, instruction: Instruction, made: dict[Datum, Any]) -> None:
        """Into the sum of its block, or, where sums have no order, into the worker's one sum as it comes."""
        scenario = self.cluster.scenario
        key = instruction.step, Block(self.seat.replica, 0) if scenario.rounds else self.cluster.blocks.of(instruction.micro_batch)
        value = made[Datum("wgrad", self.seat.stage, instruction.micro_batch, instruction.step)]
        self._sums[key] = added(self._sums.get(key, 0), value, scenario.ordered)

    def _gradient(self, step: int) -> int:
        """What is judged and applied."""
        return self.have[Datum("tied" if self.tie else "reduced", self.seat.stage, None, step)]

    def _knows_norm(self, step: int) -> bool:
        return Datum("norm", self.seat.stage, None, step) in self.have

    def _say_share(self, step: int, name: str) -> None:
        own = share(self._gradient(step)) if not self.tie or self.seat.stage == self.tie[0] else 0.0
        self.send(Contribution(self.rank, step, name, {str(self.seat.stage): own}, self.cluster.scenario.shape.stages))

    def _validate(self, step: int) -> Iterator[Any]:
        self.cluster.exercised[Rule.NORM_KEPT] += self.program.resumed and self.line.collected(step, NORM) is not None
        self._say_share(step, NORM)
        shares = yield from self.wait(f"the norm of step {step}", lambda: self.line.collected(step, NORM))
        norm = sum(shares.values()) ** 0.5
        if self.cluster.scenario.clip and over(norm, self.cluster.scenario.clip):
            self.judge(step, norm)

    def _say_losses(self, step: int) -> None:
        if self._own_losses[step]:
            expected = len(self.cluster.scenario.shape.batch)
            self.send(Contribution(self.rank, step, LOSS, dict(self._own_losses[step]), expected))

    def _reduce(self, instruction: Instruction) -> Iterator[Any]:
        """As a collective does: nobody has the result before all have come, and a death leaves some with it and some without."""
        stage, step = self.seat.stage, instruction.step
        reduced = Datum("reduced", stage, None, step)
        own = {datum: value for datum, value in self.have.items() if datum.kind == "wgrad" and datum.step == step}
        whole = self.program.holder == self.seat
        mine = own, {block: total for (of, block), total in self._sums.items() if of == step}
        brought = yield from self._together(instruction, (stage,), self.have[reduced] if whole else mine if self.program.holder is None else None)
        if reduced in self.have:
            return
        if self.program.resumed:
            self.cluster.exercised[Rule.SUMMED_AGAIN if self.program.holder is None else Rule.ROLLED_FORWARD] += 1
        if self.program.holder is not None:
            self.have[reduced] = brought[self.cluster.rank_of[self.program.holder]]
        else:
            self.have[reduced] = self._total([totals for _, totals in brought.values()])
            self.cluster.watcher.summed(self, step, [part for part, _ in brought.values()])
        for datum in own:
            del self.have[datum]
        self._sums = {key: total for key, total in self._sums.items() if key[0] != step}

    def _sum_over_tie(self, instruction: Instruction) -> Iterator[Any]:
        """Each stage's sum from any of its workers: they have the same."""
        stage, step = self.seat.stage, instruction.step
        brought = yield from self._together(instruction, self.tie, self.have[Datum("reduced", stage, None, step)])
        by_stage = {self.cluster.workers[rank].seat.stage: value for rank, value in sorted(brought.items(), reverse=True)}
        self.cluster.watcher.tied(self, step, [(self.cluster.workers[rank].seat.stage, value) for rank, value in brought.items()])
        self.cluster.exercised[Rule.TIED_AGAIN] += self.program.resumed
        self.have.setdefault(Datum("tied", stage, None, step), over_tie(by_stage, self.cluster.scenario.ordered))

    def _together(self, instruction: Instruction, stages: tuple[int, ...], mine: Any) -> Iterator[Any]:
        """What all live workers of ``stages`` bring to ``instruction``, by rank."""
        members = frozenset(member.rank for member in self.line.generation.members if member.seat.stage in stages)
        sum_ = self.cluster.sums.setdefault((self.line.number, instruction.op, stages[0], instruction.step), Sum(members))
        sum_.brought[self.rank] = mine
        if set(sum_.brought) == members:
            sum_.done = True
            for rank in members:
                self.cluster.wake(rank)
        yield from self.wait(lambda: f"the others at {instruction}", lambda: sum_.done or None)
        self.at = (COMPUTES, str(instruction))
        yield self.cluster.scenario.costs.of(instruction.op, self.seat.stage) + 1
        if sum_.touched and self.cluster.random.random() < self.cluster.scenario.torn_share:
            yield from self.wait("news of a lost worker", lambda: None)
        return sum_.brought

    def _total(self, brought: list[dict[Block, int]]) -> int:
        """The blocks' sums added in the blocks' order."""
        totals = {block: total for part in brought for block, total in part.items()}
        return reduce(lambda total, block: added(total, totals[block], self.cluster.scenario.ordered), sorted(totals), 0)

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
            self.cluster.exercised[Rule.FOR_WANT_OF_ROOM] += 1
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

    def arrange(self, rest: Rest, plan: Plan, held: Held) -> Any:
        return planner.arrange(rest, plan, self._costs, held)


def _job(scenario: Scenario) -> dict:
    shape = scenario.shape
    return {
        "replicas": shape.replicas, "stages": shape.stages, "micro_batches": shape.micro_batches, "run_dir": "", "regroup_timeout_s": REGROUP_S,
        "strict_placement": False, "clipping": scenario.clip, "clip": "sync" if scenario.policy.together else "validate", "nonfinite": "skip", "stagger_optimizer": scenario.policy.stagger_optimizer,
        "progress_timeout_s": PROGRESS_S, "idle_timeout_s": IDLE_S,
    }  # fmt: skip
