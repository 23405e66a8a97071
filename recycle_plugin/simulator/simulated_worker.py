"""A worker of a simulated cluster: ``core.worker.worker`` on a machine that has a virtual clock, lines that take time,
and exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from recycle_plugin import planner
from recycle_plugin.core.coordinator.step_validation import over
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS, awaited
from recycle_plugin.core.messages.contributions import NORM
from recycle_plugin.core.messages.from_coordinator import Generation, Replay
from recycle_plugin.core.messages.from_workers import LogFolder, Missing, Ready, StateHash
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.vocabulary.blocks import Block
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import SENDS, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import Batches
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import Held, RecoveryPlan
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.vocabulary.topology import ClusterView
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.helper import Helper
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.lockstep import Lockstep, Word
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.replay import CantReplay, StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.shares import Call, Lot, Share
from recycle_plugin.core.worker.shares import Word as ShareWord
from recycle_plugin.core.worker.step_log import StepLog
from recycle_plugin.core.worker.step_store import Retention, StepStore
from recycle_plugin.core.worker.stopwatch import Stopwatch
from recycle_plugin.core.worker.training_loop import Slowness, StepProgram, TrainingLoop
from recycle_plugin.core.worker.worker import Judging, Worker
from recycle_plugin.simulator.arithmetic import Batch, rate
from recycle_plugin.simulator.exercised import ProtocolRule
from recycle_plugin.simulator.helped_stage import HelpedStage, SentWeights, made
from recycle_plugin.simulator.numbers import Numbers
from recycle_plugin.simulator.plain import PlainIterator
from recycle_plugin.simulator.scenario import MILLISECOND, Heavy, Scenario, Trouble
from recycle_plugin.simulator.script import Died
from recycle_plugin.simulator.simulated_log import SimulatedLog, SimulatedLogs
from recycle_plugin.simulator.simulated_state import UNITS, WEIGHT, KeptState, Pipe, SimulatedState, inlet, opened

if TYPE_CHECKING:
    from recycle_plugin.simulator.cluster import Cluster

T = TypeVar("T")
HANDLING_US = 200  # of a micro-batch that is loaded, or a boundary tensor that is sent: no plan counts it
LOOK_US = 1 * MILLISECOND  # between two looks at the logs
LOGGED_US = 10_000 * MILLISECOND  # a record's wait before it is taken for lost: whoever writes it may be stopped
READING_US = 5 * MILLISECOND  # a stage's share of a checkpoint
PART_US = 100 * MILLISECOND  # of what takes long
RESEND_US = 1500 * MILLISECOND  # a datum's wait before its receiver says that it misses it
SILENCE_S = 3.0  # of a host that is gone, where any is
DEADLINES = Deadlines(
    progress_timeout_s=1.0,
    busy_timeout_s=4.0,
    last_worker_timeout_s=8.0,
    idle_timeout_s=20.0,
    regroup_timeout_s=30.0,
    wait_timeout_s=35.0,
)


class Holding(NamedTuple):
    """The part of the job that a worker holds: ``shard`` of ``seat``."""

    seat: Seat
    shard: int


@dataclass
class Sum:
    """A REDUCE or a TIE under way: who takes part, what each has brought, and whether all are there."""

    members: frozenset[int]
    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    touched: bool = False  # a member has died or was cut off before everybody had the result


class SimulatedMachine:
    """The machine of one simulated worker, which is also the port of its training loop; ``worker`` and ``loop`` run on
    it.  What may happen to it: simulator/scenario.py.
    """

    worker_class: type[Worker] = Worker

    def __init__(self, cluster: Cluster, rank: int, weight: int, incarnation: int = 0) -> None:
        scenario = cluster.scenario
        place, shard = divmod(rank, scenario.shards)
        seat = scenario.shape.seats[place]
        self.cluster, self.rank, self.seat, self.held = cluster, rank, seat, Holding(seat, shard)
        self.control_view = ControlView(rank, incarnation)
        self.control_view.newcomer, self.control_view.shard = incarnation > 0, shard
        self.numbers = Numbers(scenario, seat, shard)
        self.store = StepStore(seat, scenario.shape.stages, bool(self.numbers.tie), Retention(budget=scenario.budget))
        self.store.put(Datum("params", seat.stage, None, 1), weight)
        self.steps = StepMachine(0)
        self.store.reads_iterator = scenario.iterators
        reads = scenario.iterators and seat.stage in (0, scenario.shape.stages - 1)
        self.plain_iterator = PlainIterator(
            seat.replica, (scenario.lengths or (0,) * scenario.shape.replicas)[seat.replica]
        )
        self.iterator_data = (
            IteratorData(self.store, self.plain_iterator, self._hand_on, self._say_dealt) if reads else None
        )
        if self.iterator_data is not None and incarnation:
            self.iterator_data.in_place = False
        clips = scenario.clip > 0 and not scenario.pushes  # else a script's own step does, which waits for nobody
        judging = Judging(clips and scenario.policy.together, clips and not scenario.policy.together)
        stopwatch = Stopwatch(scenario.costs) if scenario.rebalances or scenario.slow else None
        log = self.log = self._log() if scenario.logs else None
        self._words: dict[int, Word] = {}  # the last of each other shard
        self.lockstep = Lockstep(self, seat, shard, scenario.shards) if scenario.shards > 1 else None
        self.worker: Worker = self.worker_class(
            self, scenario.shape, self.store, self.steps, judging, self.iterator_data, stopwatch, log, self.lockstep
        )
        self.script = FaultScript(scenario.faults if shard == scenario.struck else (), seat, incarnation)
        self.shared = SimulatedState(self)
        self.fill, self.write, self.gathered = self.shared.fill, self.shared.write, self.shared.gathered
        self.alive = self.runs = True
        self.stopped = self.unfenced = self.stuck = self.rude = self.waiting = self.busy = False
        self.percent, self.done, self.at, self.step, self.cpu_s = 100, 0, (WAITS, "the start"), 0, 0.0
        self.waits_for, self._waited_us = "", 0
        self.current: Instruction | None = None  # the one that it is at
        self.losses: dict[int, dict] = {}  # as the training script gets them, by step
        self.reason: str | None = None  # of its end before the last step
        self.through = False  # its script has come to its end
        self.life: Iterator[Any]  # its training script (simulator/script.py)
        self.loop: TrainingLoop = TrainingLoop(
            self, self.worker, cluster.planner, scenario.shape, seat, self.steps, self.lockstep
        )
        self.worker.applied = self.loop.applied
        self.replays_along = False
        replay = None if log is None else self._replay(log)
        if replay is not None:
            blocks, splits = scenario.policy.blocks(scenario.shape), scenario.policy.split_backward
            self.worker.helper = Helper(self, scenario.shape, blocks, splits)
            self.worker.companion = Companion(self, self.store, self.steps, replay, self.worker.undo)
        self.newcomer = (
            Newcomer(
                self,
                self.loop,
                FilledStage(self, self.store, self.steps),
                partial(inlet, self),
                self.worker.skip_to,
                replay=replay,
            )
            if incarnation
            else None
        )
        self._inbox: list[tuple[Datum, Any, int]] = []
        self._said: list[ShareWord] = []
        self._lots: set[tuple[int, Block]] = set()  # what others were to make of a replay, by step
        self._last_step = 0
        self.unheard: frozenset[int] = frozenset()  # ranks of which nothing is taken any more

    def begin_epoch(self, step: int) -> None:
        """Reads another iterator from ``step`` on."""
        if self.iterator_data is not None:
            self.plain_iterator.begin_another()
            self.iterator_data.begin_another(step)

    def ready(self, incarnation: int | None = None) -> Ready:
        """The message by which this worker, or another ``incarnation`` of its rank, asks to take part."""
        incarnation = self.control_view.incarnation if incarnation is None else incarnation
        return Ready(
            Member(
                self.rank,
                self.seat,
                _address(self.rank, incarnation),
                f"host{self.rank}",
                incarnation,
                self.held.shard,
            ),
            0,
            _job(self.cluster.scenario),
            LogFolder("", f"host{self.rank}" if self.cluster.scenario.logs_apart else "all hosts", "")
            if self.cluster.scenario.logs
            else None,
        )

    # logs

    def _log(self) -> StepLog:
        self.cluster.logs.append(SimulatedLog(self))
        return StepLog(self.cluster.logs[-1], range(self.cluster.scenario.shape.stages - 1))

    def _replay(self, log: StepLog) -> StageReplay:
        scenario, blocks = self.cluster.scenario, self.cluster.scenario.policy.blocks(self.cluster.scenario.shape)
        helpers = Helpers(self, self.store, scenario.shape, blocks, scenario.helpers)
        splits = scenario.policy.split_backward
        return StageReplay(self, self.store, self.steps, scenario.shape, splits, log, helpers)

    @property
    def address(self) -> str:
        """Where other workers find this one."""
        return _address(self.rank, self.control_view.incarnation)

    def tell(self, address: str, word: ShareWord) -> None:
        """Says something of a replay to the worker at ``address``."""
        if isinstance(word, Lot):
            lot = {(word.step, block) for block in word.blocks}
            self.cluster.exercised[ProtocolRule.DEALT_AGAIN] += bool(lot & self._lots)
            self._lots |= lot
        self.cluster.exercised[ProtocolRule.HELPED_BESIDE] += isinstance(word, Share) and self.control_view.outside
        self.cluster.tell_worker(self.rank, address, word)

    def hear(self, word: ShareWord) -> None:
        """Takes in what another worker says of a replay."""
        self._said.append(word)

    def words(self) -> list[ShareWord]:
        """What has been said to this worker of replays since this was asked last."""
        found, self._said = self._said, []
        return found

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        """Yields for a moment.  Raises JobEnded."""
        self.control_view.check_end()
        self.at = (WAITS, what)
        yield LOOK_US

    def make_stage(self, call: Call) -> Waits[HelpedStage]:
        """The value is the stage that ``call`` asks for, made beside this worker's own.  Raises CantHelp in some."""
        return (yield from made(self, call.stage))

    def weights(self) -> SentWeights:
        """The weight of this stage."""
        return SentWeights(self.store[Datum("params", self.seat.stage, None, self.steps.stepped + 1)])

    def add_share(self, step: int, sums: Any) -> None:
        """Adds what a share has to this worker's own sums."""
        self.cluster.exercised[ProtocolRule.SHARED] += 1
        self.numbers.add_sums(step, sums)

    def why_alone(self) -> str:
        """Nothing: everybody can make every stage."""
        return ""

    def logs(self) -> SimulatedLogs:
        """The logs of all processes of the job."""
        return SimulatedLogs(self.cluster.logs)

    def wait_logged(self, what: str, ready: Callable[[], T | None], made: bool) -> Waits[T]:
        """Yields until ``ready()`` is not None; that is the value.  Raises JobEnded, and CantReplay after a while,
        where what is waited for was ``made`` long ago.
        """
        late = self.cluster.now + LOGGED_US
        while (value := ready()) is None:
            self.control_view.check_end()
            if made and self.cluster.now > late:
                raise CantReplay(f"{what} is in no log")
            self.at = (WAITS, what)
            yield LOOK_US
        return value

    @property
    def replays(self) -> bool:
        """Whether this worker replays its stage."""
        return self.control_view.outside or self.replays_along

    def keep_state(self) -> tuple[KeptState, int]:
        """All numbers of the stage, and the learning rate."""
        self.replays_along = True
        self.cluster.exercised[ProtocolRule.ACCOMPANIED] += 1
        return self.shared.kept(), self.numbers.rate

    def otherwise(self, kept: tuple[KeptState, int]) -> str:
        """Says so where the numbers are others, though nobody rounds."""
        now, (before, _) = self.shared.kept(), kept
        return "" if now == before or self.cluster.scenario.rounds else f"{now}, and it was {before}"

    def put_back(self, kept: tuple[KeptState, int]) -> None:
        """Has all numbers again."""
        self.replays_along = False
        numbers, self.numbers.rate = kept
        self.shared.restore(numbers)

    def restore(self, replay: Replay) -> Waits[int]:
        """Takes the state of this stage from a checkpoint; the value is what it weighs."""
        yield READING_US
        weight, moments = self.cluster.saved[replay.step, self.seat.stage]
        self.fill(None)
        self.write(WEIGHT, weight)
        for name, moment in moments.items():
            self.write(name, moment)
        return sum(UNITS.values())

    def differs(self, made: int, sent: int) -> str:
        """Says so where two numbers are not the same, though nobody rounds."""
        return "" if made == sent or self.cluster.scenario.rounds else f"{made}, and it was {sent}"

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> Any:
        """The sum over all blocks of the stage, which are all here."""
        total = self.numbers.total([self.numbers.sums(instruction.step)])
        self.numbers.forget_sums()
        return total

    def tied_in_order(self, total: Any) -> Any:
        """The sum itself."""
        return total

    def tied_of(self, logged: Any) -> Any:
        """The sum over a tie: all stages of it have the same."""
        return logged

    # lines and the clock

    def wait(
        self, what: Any, ready: Callable[[], T | None], interruptible: bool = True, at_least_s: float = 0.0
    ) -> Waits[T]:
        """Yields until ``ready()`` is not None; that is the value.  Raises JobEnded, and Interrupted if
        ``interruptible``.
        """
        began_us = self.cluster.now
        try:
            while True:
                self.control_view.check_end()
                if interruptible:
                    self.control_view.check()
                value = ready()
                if value is not None:
                    return value
                self.at = (WAITS, what if isinstance(what, str) else what())
                yield self.at[1]
        finally:
            self._waited_us += self.cluster.now - began_us

    def wait_for(self, datum: Datum, source: Seat, ready: Callable[[], T | None]) -> Waits[T]:
        """Yields until ``ready()`` is not None, for ``datum`` that comes from ``source``; complains where that takes
        too long.
        """
        self.cluster.later(RESEND_US, partial(self._complain, self.control_view.number, datum, source))
        return (yield from self.wait(lambda: awaited(datum, source), ready))

    def wait_for_commit(self, step: int) -> Iterator[Any]:
        """Yields until ``step`` is committed."""
        self.cluster.exercised[ProtocolRule.LATE_COMMIT] += not self.control_view.is_committed(step)
        yield from self.wait(f"the commit of step {step}", lambda: self.control_view.is_committed(step))

    def send(self, message: object) -> None:
        """Sends ``message`` to the coordinator, as a session does with the incarnation of whoever says it."""
        if isinstance(message, OfWorker) and self.control_view.incarnation:
            message = replace(message, incarnation=self.control_view.incarnation)
        self.cluster.tell_coordinator(self.rank, message)

    def say_in_seat(self, word: Word) -> None:
        """Sends ``word`` to the other shards of the seat."""
        self.cluster.tell_seat(self, word)

    def hear_in_seat(self, shard: int, word: Word) -> None:
        """Takes in a word of another shard."""
        self._words[shard] = word
        assert self.lockstep is not None, "there are other shards"
        goes_on = word.generation == self.control_view.number and self.control_view.generation is not None
        self.cluster.exercised[ProtocolRule.RAN_ON] += goes_on and (word.stopped or 0) > self.lockstep.finished

    def heard_in_seat(self, shard: int) -> Word:
        """The last word of another shard."""
        return self._words.get(shard, Word())

    def transfer(self, datum: Datum, value: Any, target: Seat, valid_from: int) -> None:
        """Sends a value to the peer at ``target``."""
        peer = self.control_view.roster.holding(target, self.held.shard)
        self.cluster.send(self.rank, peer.rank, datum, value, valid_from)

    def deliver(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Puts a value that a peer has sent where :meth:`arrivals` finds it."""
        self._inbox.append((datum, value, valid_from))

    def arrivals(self) -> Iterable[tuple[Datum, Any, int]]:
        """The data that has come from peers since this was asked last: datum, value, and the generation from which the
        sender's data is valid.
        """
        arrived, self._inbox = self._inbox, []
        return arrived

    def hear_out(self) -> None:
        """Takes what the lost have sent before they went; of a host that is gone nothing comes any more.

        Who finds out that it hears nobody says so.
        """
        if self.cluster.deafened.get(self.rank):
            self.send(Missing(self.rank, self.control_view.number, "what peers send", str(self.seat)))
        coming = self.control_view.interruption()
        if coming is not None:
            live = {member.rank for member in coming.roster}
            self.cluster.hurry(self.rank, live)
            self.unheard = frozenset(self.cluster.workers.keys() - live)

    def keep_only(self, members: Iterable[str]) -> None:
        """Hears whoever has come back meanwhile; simulated connections need no dropping."""
        self.unheard -= {int(address.partition(".")[0]) for address in members}

    def clock(self) -> float:
        """The virtual time in seconds."""
        return self.cluster.now / 1e6

    def now_us(self) -> int:
        """The virtual time in microseconds."""
        return self.cluster.now

    def waited_us(self) -> int:
        """How long this worker has waited for others so far."""
        return self._waited_us

    def reach(self, when: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        """Strikes with the fault that is named for this point of recovery (one argument), or for before or after an
        instruction.  Raises :class:`simulator.script.Died` where it is a kill.
        """
        fault = self.script.due("at", when) if instruction is None else self.script.due(when, str(instruction))
        if fault is not None:
            self.cluster.hit(fault.kind, self.rank)
        if fault is not None and fault.kind == "kill":
            raise Died
        if fault is not None:
            self.cluster.trouble(self.rank, Trouble("stop", self.cluster.now, (self.seat,), for_us=5_000 * MILLISECOND))

    def _hand_on(self, datum: Datum, batch: Batch, taker: Seat) -> None:
        self.transfer(datum, batch, taker, self.store.valid_from)

    def _say_dealt(self, step: int, retired: set[int], dealt: Batches) -> None:
        self.cluster.exercised[ProtocolRule.DEALT] += 1

    def record(self, span: Span) -> Iterable[Span]:
        """Takes the time span of an instruction that has run into the cluster's trace; it is over."""
        self.done += 1
        self.cluster.spans.append(span)
        if span.instruction.op in SENDS:
            self.cluster.watcher.sent(self)
        return (span,)

    def _complain(self, generation: int, datum: Datum, source: Seat) -> None:
        """Tells the coordinator that a datum is missing, where the same wait lasts too long."""
        waits = (
            self.alive
            and self.waiting
            and self.control_view.number == generation
            and self.at == (WAITS, awaited(datum, source))
        )
        if waits and self.control_view.interruption() is None and not self.cluster.quiet:
            self.cluster.watcher.missed(self, datum, source)
            silent = self.seat if self.cluster.deafened.get(self.rank) else source
            self.send(Missing(self.rank, generation, str(datum), str(silent)))
            self.cluster.later(RESEND_US, partial(self._complain, generation, datum, source))

    # computing

    @contextmanager
    def running(self, program: StepProgram) -> Iterator[tuple[Instruction, ...]]:
        """A context in which ``program`` runs; its value is the instructions to execute."""
        self.cluster.exercised[ProtocolRule.EVALUATED_AGAIN] += program.step == self._last_step < 0
        self._last_step = program.step
        self.step = max(self.step, program.step)
        yield program.instructions

    @contextmanager
    def performing(self, instruction: Instruction) -> Iterator[None]:
        """A context in which ``instruction`` is carried out."""
        self.current, self.at = instruction, (COMPUTES, str(instruction))
        if instruction.op is Op.VALIDATE:
            self.cluster.exercised[ProtocolRule.NORM_KEPT] += (
                self.worker.running.resumed and self.control_view.collected(instruction.step, NORM) is not None
            )
        yield

    def spend(self, instruction: Instruction) -> Iterator[int]:
        """Yields the microseconds that ``instruction`` takes; for ever on a stuck worker."""
        if instruction.op in (Op.REDUCE, Op.TIE, Op.VALIDATE):
            return
        if self.replays:
            self.at = (ELSEWHERE, f"{instruction} of a replay")
            self.cluster.replayed.append((self.seat, instruction))
            self.cluster.exercised[ProtocolRule.DEALT_AGAIN] += self._was_dealt(instruction)
            self.reach("before", self.seat, instruction)
        handling = HANDLING_US if instruction.op in SENDS or instruction.op is Op.LOAD else 0
        for heavy in self.cluster.scenario.heavy:
            if (heavy.step, heavy.stage, heavy.op, heavy.micro_batch) == (
                instruction.step,
                instruction.stage,
                str(instruction.op),
                str(instruction.micro_batch),
            ):
                yield from self._spend_long(heavy)
        spent = (handling + self.cluster.scenario.costs.of(instruction.op, self.seat.stage)) * self.percent // 100
        if spent:
            yield spent
        yield from self.hang()

    def _was_dealt(self, instruction: Instruction) -> bool:
        """Whether ``instruction`` begins what another worker was to make of a replay."""
        begins = instruction.op is Op.F
        return begins and (instruction.step, self.numbers.block(instruction.works_on)) in self._lots

    def hang(self) -> Iterator[int]:
        """Yields for ever on a stuck worker."""
        while self.stuck:
            yield 10**9

    def _spend_long(self, heavy: Heavy) -> Iterator[int]:
        """Yields a long time in parts, so that the supervisor sees how the CPU is used meanwhile."""
        for _ in range(heavy.for_us // PART_US):
            yield PART_US
            self.cpu_s += heavy.computes * PART_US / 1e6

    def open_outlet(self, newcomer: WorkerId) -> tuple[SimulatedState, Pipe, str]:
        """The state for ``newcomer``, the line to it, and the name of that."""
        return opened(self, newcomer)

    def script_state(self) -> bytes:
        """Nothing: a simulated script has nothing of its own."""
        return b""

    def hash_state(self, step: int) -> None:
        """Sends the hash of the state after ``step``."""
        self.send(StateHash(self.rank, step, self.shared.digest()))

    def finish_hash(self) -> None:
        """Returns at once: hashes are made in no time."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Makes what ``instruction`` provides, in exact numbers, and tells the watcher."""
        if self.shared.applies is not None:
            return self.shared.follow(instruction.step)
        if self.replays:  # so far only here, where nobody waits for it
            made = self.numbers.compute(instruction, have, boundary_only)
            if instruction.op is Op.STEP:
                (weight,) = made.values()
                self.cluster.watcher.replayed(self, instruction.step, weight)
            self.reach("after", self.seat, instruction)
            return made
        if instruction.op is Op.STEP:
            norm = have.get(Datum("norm", self.seat.stage, None, instruction.step))
            clipped_by = norm if norm is not None and over(norm, self.cluster.scenario.clip) else None
            self.cluster.watcher.applied(
                self, instruction.step, self.numbers.gradient(instruction.step, have), clipped_by
            )
        made = self.numbers.compute(instruction, have, boundary_only)
        if instruction.op is Op.LOAD and instruction.step > 0 and have.reads_iterator:
            (drawn,) = have.requires(instruction)
            self.cluster.exercised[ProtocolRule.KEPT_DATA] += (
                Seat(have[drawn].draw.source, self.seat.stage) not in self.control_view.roster.seats
            )
            self.cluster.watcher.loaded(self, instruction, have[drawn])
        self.cluster.watcher.computed(self, instruction, boundary_only)
        return made

    def add_up(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
        """Makes the sum of a REDUCE or TIE as a collective does: nobody has the result before all have come, and a
        death leaves some with it and some without.
        """
        total = (
            yield from self._sum(instruction, have, holder)
            if instruction.op is Op.REDUCE
            else self._sum_over_tie(instruction, have)
        )
        if self.lockstep is not None:
            yield from self.lockstep.begin_sum(instruction)
        if instruction.op is Op.REDUCE and holder is None:
            self.numbers.forget_sums()
        return total

    def set_for(self, step: int) -> None:
        """Sets what the script sets for ``step``."""
        self.numbers.rate = rate(step, self.cluster.scenario.by_hand)

    def go_by(self, share: LiveShare) -> None:
        """Takes which part of the replicas contributes from now on."""
        self.numbers.contributing = share

    def settings(self) -> int:
        """The learning rate."""
        return self.numbers.rate

    def take_settings(self, settings: int) -> None:
        """Sets another worker's learning rate."""
        self.numbers.rate = settings

    def share(self, step: int, have: StepStore) -> float:
        """This stage's share of the squared norm of ``step``."""
        return self.numbers.share(step, have)

    def norm(self, shares: Any) -> float:
        """The norm over all stages, from the share of each."""
        return self.numbers.norm(shares)

    def number(self, loss: int) -> int:
        """The loss itself, which is a number already."""
        return loss

    def undo(self, step: int) -> None:
        """Takes the weights' last step back."""
        self.cluster.exercised[ProtocolRule.TAKEN_BACK] += 1
        self.numbers.taken_back()

    def forget_sums(self, after: int) -> None:
        """Drops the weight gradients that were added up here."""
        self.cluster.watcher.voided(self, after)
        self.numbers.forget_sums()

    def _sum(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
        reduced, stage = Datum("reduced", self.seat.stage, None, instruction.step), (self.seat.stage,)
        if holder is not None:
            brought = yield from self._together(instruction, stage, have[reduced] if holder == self.seat else None)
            self.cluster.exercised[ProtocolRule.ROLLED_FORWARD] += reduced not in have
            return brought[self.control_view.roster.holding(holder, self.held.shard).rank]
        counted = have.of("wgrad", instruction.step)
        brought = yield from self._together(instruction, stage, (counted, self.numbers.sums(instruction.step)))
        self.cluster.exercised[ProtocolRule.SUMMED_AGAIN] += self.worker.running.resumed
        self.cluster.watcher.summed(self, instruction.step, {rank: part for rank, (part, _) in brought.items()})
        return self.numbers.total([sums for _, sums in brought.values()])

    def _sum_over_tie(self, instruction: Instruction, have: StepStore) -> Waits[Any]:
        """Makes the sum over a tie, each stage's sum from any of its workers: they have the same."""
        brought = yield from self._together(
            instruction, self.numbers.tie, have[Datum("reduced", self.seat.stage, None, instruction.step)]
        )
        by_stage = {
            self.cluster.workers[rank].seat.stage: value for rank, value in sorted(brought.items(), reverse=True)
        }
        self.cluster.watcher.tied(
            self, instruction.step, [(self.cluster.workers[rank].seat.stage, value) for rank, value in brought.items()]
        )
        self.cluster.exercised[ProtocolRule.TIED_AGAIN] += self.worker.running.resumed
        return self.numbers.over_tie(by_stage)

    def _together(self, instruction: Instruction, stages: tuple[int, ...], mine: Any) -> Waits[Any]:
        """The values that all live workers of ``stages`` bring to ``instruction``, by rank."""
        members = frozenset(member.rank for member in self.control_view.roster.stages(stages, self.held.shard))
        sum_ = self.cluster.sums.setdefault(
            (self.control_view.number, instruction.op, stages[0], instruction.step, self.held.shard), Sum(members)
        )
        sum_.brought[self.rank] = mine
        if set(sum_.brought) == members:
            sum_.done = True
            for rank in members:
                self.cluster.wake(self.cluster.workers[rank])
        yield from self.wait(lambda: f"the others at {instruction}", lambda: sum_.done or None)
        self.at = (COMPUTES, str(instruction))
        yield self.cluster.scenario.costs.of(instruction.op, self.seat.stage) + 1
        if sum_.touched and self.cluster.random.random() < self.cluster.scenario.torn_share:
            yield from self.wait("news of a lost worker", lambda: None)
        return sum_.brought


class SharedPlanner:
    """The planner of all workers of a cluster, as core.worker.training_loop.Planner; what several workers ask for alike
    is worked out once.
    """

    def __init__(self, costs: CostModel, policy: Policy) -> None:
        self._costs, self._policy = costs, policy
        self._plans: dict[tuple[frozenset[Seat], Slowness], Plan] = {}

    def plan(self, view: ClusterView, generation: Generation) -> Plan:
        """The plan for the live seats of ``view``, with the slowness that ``generation`` names.  Raises PlanError."""
        case = view.live, generation.slowness
        if case not in self._plans:
            self._plans[case] = planner.plan(view, self._costs.slowed(generation.slowness), self._policy)
        return self._plans[case]

    def lowered(self, plan: Plan, seat: Seat, step: int) -> tuple[Instruction, ...]:
        """The program of ``seat`` in ``plan`` for ``step``."""
        return planner.lowered(plan, seat, step)

    def arrange(self, recovery: RecoveryPlan, plan: Plan, held: Held) -> Any:
        """The program of every live seat that carries ``recovery`` out."""
        return planner.arrange(recovery, plan, self._costs, held)


def _address(rank: int, incarnation: int) -> str:
    return f"{rank}" + f".{incarnation}" * (incarnation > 0)


def _job(scenario: Scenario) -> JobSpec:
    shape, policy = scenario.shape, scenario.policy
    return JobSpec(
        shape.replicas,
        shape.stages,
        shape.micro_batches,
        shape.ties,
        "",
        scenario.costs,
        policy,
        replace(DEADLINES, heartbeat_timeout_s=SILENCE_S) if scenario.loses_hosts else DEADLINES,
        rebalance=scenario.rebalances,
        rejoin=scenario.rejoin,
        unit=scenario.unit,
        slow=scenario.slow,
        pushed=scenario.pushes,
        log=scenario.logs,
        boundaries=scenario.log_choices[0] if scenario.log_choices else "all",
        stagger_optimizer=policy.stagger_optimizer,
        clipping=0.0 if scenario.pushes else scenario.clip,
        clip="sync" if policy.together else "validate",
        nonfinite="skip",
    )
