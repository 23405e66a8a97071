"""A worker of a simulated cluster: core/worker/worker.py with a virtual clock, slow lines and exact numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from recycle_plugin.core.coordinator.facts.step_validation import over
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS, Activity, awaited
from recycle_plugin.core.messages.contributions import NORM
from recycle_plugin.core.messages.from_workers import Missing, Post, ReadBoard, Ready, StateHash
from recycle_plugin.core.messages.said import OfWorker
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.faults import FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import SENDS, Instruction, Op
from recycle_plugin.core.vocabulary.iterator_draws import Batches
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.vocabulary.step_batches import LiveShare
from recycle_plugin.core.worker.companion import Companion
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.filled_stage import FilledStage
from recycle_plugin.core.worker.helper import Helper
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.lockstep import Lockstep, Word
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.newcomer import Newcomer
from recycle_plugin.core.worker.observer import Observer
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.shares import Call
from recycle_plugin.core.worker.step_log import StepLog
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.core.worker.stopwatch import Stopwatch
from recycle_plugin.core.worker.training_loop import TrainingLoop
from recycle_plugin.core.worker.worker import Judging, Worker
from recycle_plugin.lab.simulator import simulated_spec, simulated_sums
from recycle_plugin.lab.simulator.arithmetic import PRIME, Batch, rate
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.helped_stage import SimulatedHelpedStage, made
from recycle_plugin.lab.simulator.numbers import MOMENTS, Numbers
from recycle_plugin.lab.simulator.plain import PlainIterator
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Heavy, Trouble
from recycle_plugin.lab.simulator.script import Died
from recycle_plugin.lab.simulator.simulated_boards import SimulatedView
from recycle_plugin.lab.simulator.simulated_log import SimulatedLog
from recycle_plugin.lab.simulator.simulated_replays import SimulatedReplays
from recycle_plugin.lab.simulator.simulated_state import SimulatedLine, SimulatedState, inlet, opened

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster

T = TypeVar("T")
HANDLING_US = 200  # to load a micro-batch or send a boundary tensor: no plan counts it
PART_US = 100 * MILLISECOND  # of long work
RESEND_US = 1500 * MILLISECOND  # a receiver's wait before it reports a datum as missing


class Holding(NamedTuple):
    """The part of the job that a worker holds: ``shard`` of ``seat``."""

    seat: Seat
    shard: int


class SimulatedMachine(SimulatedReplays):
    """The machine of one simulated worker, and its training loop's port; troubles are in lab/simulator/scenario.py."""

    worker_class: type[Worker] = Worker
    control_view: SimulatedView

    def __init__(self, cluster: Cluster, rank: int, weight: int, incarnation: int = 0) -> None:
        super().__init__()
        scenario = cluster.scenario
        place, shard = divmod(rank, scenario.shards)
        seat = scenario.shape.seats[place]
        self.cluster, self.rank, self.seat, self.held = cluster, rank, seat, Holding(seat, shard)
        self.control_view = SimulatedView(rank, incarnation, self._say_at_once)
        self.control_view.shard = shard
        self.numbers = Numbers(scenario, seat, shard)
        self.store = StepStore(seat, scenario.shape.stages, bool(self.numbers.tie), scenario.budget)
        self.store.put(of_layers("params", seat, 1), weight)
        self.steps = StepMachine(0)
        self.store.reads_iterator = scenario.iterators
        self.plain_iterator = PlainIterator(
            seat.replica, (scenario.lengths or (0,) * scenario.shape.replicas)[seat.replica]
        )
        self.iterator_data = self._iterator_data()
        self.log = self._log() if scenario.logs else None
        self._words: dict[int, Word] = {}  # the last message of each other shard
        self.lockstep = Lockstep(self, seat, shard, scenario.shards) if scenario.shards > 1 else None
        self.worker = self._worker()
        self.script = FaultScript(scenario.faults if shard == scenario.struck else (), seat, incarnation)
        self.shared = SimulatedState(self)
        self.units, self.operations, self.hashing = self.shared, self, self
        self.alive = self.runs = True
        self.stopped = self.unfenced = self.stuck = self.rude = self.waiting = self.busy = False
        self.vanishes = 0  # its script calls os._exit(0) after this step, or a later one
        self.code = -9  # exit code, if it does not leave
        self.percent, self.done, self.at, self.step, self.cpu_s = 100, 0, Activity(WAITS, "the start"), 0, 0.0
        self.waits_for, self._waited_us = "", 0
        self.current: Instruction | None = None  # the present one
        self.losses: dict[int, dict] = {}  # by step, as the training script gets them: each on the last stage
        self.means: dict[int, float] = {}  # by step
        self.reason: str | None = None  # why it ended before the last step
        self.through = False  # its script has come to its end
        self.counts = False  # it waits to hear where the others are
        self.life: Iterator[Any]  # its training script (lab/simulator/script.py)
        self.loop: TrainingLoop = TrainingLoop(
            self, self.worker, cluster.planner, scenario.shape, seat, self.steps, self.lockstep
        )
        self.worker.applied = self.loop.applied
        replay = None if self.log is None else self._replay(self.log)
        self.newcomer = self._newcomer(replay) if incarnation else None
        self._inbox: list[tuple[Datum, Any, int]] = []
        self._last_step = 0
        self.unheard: frozenset[int] = frozenset()  # ranks whose data is dropped

    def _iterator_data(self) -> IteratorData | None:
        scenario = self.cluster.scenario
        if not scenario.iterators or self.seat.stage not in (0, scenario.shape.stages - 1):
            return None
        made = IteratorData(self.store, self.plain_iterator, self._hand_on, self._say_dealt)
        made.in_place &= not self.control_view.newcomer
        return made

    def _worker(self) -> Worker:
        scenario = self.cluster.scenario
        clips = scenario.clip > 0 and not scenario.pushes  # a pushing script's own step clips, and waits for nobody
        judging = Judging(clips and scenario.policy.together, clips and not scenario.policy.together)
        observers: list[Observer] = [] if self.log is None else [self.log]
        if scenario.rebalances or scenario.slow:
            observers.append(Stopwatch(scenario.costs, self))
        shape, data = scenario.shape, self.iterator_data
        return self.worker_class(self, shape, self.store, self.steps, judging, data, observers, self.lockstep)

    def _newcomer(self, replay: StageReplay | None) -> Newcomer:
        filled = FilledStage(self, self.store, self.steps)
        skip, from_top = self.worker.skip_to, self.worker.called
        return Newcomer(self, self.loop, filled, partial(inlet, self), skip, replay=replay, from_top=from_top)

    def begin_epoch(self, step: int) -> None:
        """Read another iterator from ``step`` on."""
        if self.iterator_data is not None:
            self.plain_iterator.begin_another()
            self.iterator_data.begin_another(step)

    def ready(self, incarnation: int | None = None) -> Ready:
        """Return the message by which this worker, or another ``incarnation`` of its rank, asks to take part."""
        incarnation = self.control_view.incarnation if incarnation is None else incarnation
        return simulated_spec.ready(self.cluster.scenario, self.rank, self.seat, self.held.shard, incarnation)

    # logs

    def _log(self) -> StepLog:
        self.cluster.logs.append(SimulatedLog(self))
        return StepLog(self.cluster.logs[-1], range(self.cluster.scenario.shape.stages - 1))

    def _replay(self, log: StepLog) -> StageReplay:
        """Return how this worker replays its stage, alone or as a companion; let it help others too from now on."""
        scenario, blocks = self.cluster.scenario, self.cluster.scenario.policy.blocks(self.cluster.scenario.shape)
        helpers = Helpers(self, self.store, scenario.shape, blocks, scenario.helpers)
        splits = scenario.policy.split_backward
        replay = StageReplay(self, self.store, self.steps, scenario.shape, splits, log, helpers)
        self.worker.helper = Helper(self, scenario.shape, blocks, splits)
        self.worker.companion = Companion(self, self.store, self.steps, replay, self.worker.undo)
        return replay

    def make_stage(self, call: Call) -> Waits[SimulatedHelpedStage]:
        """Make the stage that ``call`` asks for, beside this worker's own. Raises CantHelp in some jobs."""
        return (yield from made(self, call.stage))

    # lines and the clock

    def wait(
        self, what: Any, ready: Callable[[], T | None], interruptible: bool = True, at_least_s: float = 0.0
    ) -> Waits[T]:
        """Wait for ``ready()``, serve newcomers meanwhile, return its value. JobEnded; Interrupted if
        ``interruptible``.
        """
        began_us = self.cluster.now
        try:
            while True:
                while self.worker.serve_now(waiting=True):
                    pass
                self.control_view.check_end()
                if interruptible:
                    self.control_view.check()
                value = ready()
                if value is not None:
                    return value
                self.at = Activity.of(WAITS, what)
                yield str(self.at)
        finally:
            self._waited_us += self.cluster.now - began_us

    def wait_for(self, datum: Datum, source: Seat, ready: Callable[[], T | None]) -> Waits[T]:
        """Wait until ``ready()`` is not None, for ``datum`` from ``source``; complain if that takes too long."""
        self.cluster.later(RESEND_US, partial(self._complain, self.control_view.number, datum, source))
        return (yield from self.wait(lambda: awaited(datum, source), ready))

    def wait_for_commit(self, step: int) -> Iterator[Any]:
        """Wait until ``step`` is committed."""
        self.cluster.exercised[ProtocolRule.LATE_COMMIT] += not self.control_view.is_committed(step)
        yield from self.wait(f"the commit of step {step}", lambda: self.control_view.is_committed(step))

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator with this worker's incarnation, as a session does."""
        self.cluster.tell_coordinator(self.rank, self._stamped(message))

    def _stamped(self, message: T) -> T:
        if isinstance(message, OfWorker) and self.control_view.incarnation:
            return replace(message, incarnation=self.control_view.incarnation)
        return message

    def _say_at_once(self, message: Post | ReadBoard) -> None:
        self.cluster.say_at_once(self.rank, self._stamped(message))

    def say_in_seat(self, word: Word) -> None:
        """Send ``word`` to the other shards of the seat."""
        self.cluster.tell_seat(self, word)

    def hear_in_seat(self, shard: int, word: Word) -> None:
        """Record a message of another shard."""
        self._words[shard] = word
        assert self.lockstep is not None, "there are other shards"
        goes_on = word.generation == self.control_view.number and self.control_view.generation is not None
        self.cluster.exercised[ProtocolRule.RAN_ON] += goes_on and (word.stopped or 0) > self.lockstep.finished

    def heard_in_seat(self, shard: int) -> Word:
        """Return the last message of another shard."""
        return self._words.get(shard, Word())

    def transfer(self, datum: Datum, value: Any, target: Seat, valid_from: int) -> None:
        """Send a value to the peer at ``target``."""
        address = self.control_view.roster.address(target, self.held.shard)
        self.cluster.send(self.rank, simulated_spec.rank_at(address), datum, value, valid_from)

    def deliver(self, datum: Datum, value: Any, valid_from: int) -> None:
        """Put a peer's value where :meth:`arrivals` finds it."""
        self._inbox.append((datum, value, valid_from))

    def arrivals(self) -> Iterable[tuple[Datum, Any, int]]:
        """Return the data from peers since the last call: datum, value, and the generation since which it is valid."""
        arrived, self._inbox = self._inbox, []
        return arrived

    def hear_out(self) -> None:
        """Take what lost workers have sent before they went, and drop what comes of them later; a lost host delivers
        nothing. A worker that finds that it hears nobody reports it.
        """
        if self.cluster.deafened.get(self.rank):
            self.send(Missing(self.rank, self.control_view.number, "what peers send", str(self.seat)))
        coming = self.control_view.interruption()
        if coming is not None:
            live = set(map(simulated_spec.rank_at, coming.roster.addresses))
            self.cluster.hurry(self.rank, live)
            self.unheard = frozenset(self.cluster.workers.keys() - live)

    def keep_only(self, members: Iterable[str]) -> None:
        """Do nothing: simulated connections need no dropping."""

    def listen_to(self, members: Iterable[str]) -> None:
        """Take from now on also what workers at these addresses send."""
        self.unheard -= set(map(simulated_spec.rank_at, members))

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.cluster.now / 1e6

    def now_us(self) -> int:
        """Return the virtual time in microseconds."""
        return self.cluster.now

    def waited_us(self) -> int:
        """Return how long this worker has waited for others so far, in microseconds."""
        return self._waited_us

    def reach(self, when: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        """Strike with the fault named for a point (one argument), or around an instruction. Raises script.Died."""
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
        """Add an instruction's time span to the cluster's trace."""
        self.done += 1
        self.cluster.spans.append(span)
        if span.instruction.op in SENDS:
            self.cluster.watcher.sent(self)
        return (span,)

    def _complain(self, generation: int, datum: Datum, source: Seat) -> None:
        """Report a datum as missing to the coordinator, if the same wait still lasts."""
        waits = (
            self.alive and self.waiting and self.control_view.number == generation and self.at == awaited(datum, source)
        )
        if waits and self.control_view.interruption() is None and not self.cluster.quiet:
            self.cluster.watcher.missed(self, datum, source)
            silent = self.seat if self.cluster.deafened.get(self.rank) else source
            self.send(Missing(self.rank, generation, str(datum), str(silent)))
            self.cluster.later(RESEND_US, partial(self._complain, generation, datum, source))

    # computing

    @contextmanager
    def running(self, program: StepProgram) -> Iterator[tuple[Instruction, ...]]:
        """Return a context in which ``program`` runs; its value is the instructions to execute."""
        self.cluster.exercised[ProtocolRule.EVALUATED_AGAIN] += program.step == self._last_step < 0
        self._last_step = program.step
        self.step = max(self.step, program.step)
        yield program.instructions

    def begin(self, instruction: Instruction) -> None:
        """Record that ``instruction`` is carried out now."""
        self.current, self.at = instruction, Activity(COMPUTES, instruction)
        if instruction.op is Op.VALIDATE:
            self.cluster.exercised[ProtocolRule.NORM_KEPT] += (
                self.worker.running.resumed and self.control_view.collected(instruction.step, NORM) is not None
            )

    def end(self, instruction: Instruction) -> None:
        """Do nothing: a resting worker waits, and reports that."""

    def spend(self, instruction: Instruction) -> Iterator[int]:
        """Spend the microseconds that ``instruction`` takes; never return on a stuck worker."""
        if instruction.op in (Op.REDUCE, Op.TIE, Op.VALIDATE):
            return
        if self.replays:
            self.at = Activity(ELSEWHERE, f"{instruction} of a replay")
            self.cluster.replayed.append((self.seat, instruction))
            self.cluster.exercised[ProtocolRule.DEALT_AGAIN] += self.was_dealt(instruction)
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

    def hang(self) -> Iterator[int]:
        """Never return on a stuck worker."""
        while self.stuck:
            yield 10**9

    def _spend_long(self, heavy: Heavy) -> Iterator[int]:
        """Spend a long time in parts, so that the supervisor sees the CPU use meanwhile."""
        for _ in range(heavy.for_us // PART_US):
            yield PART_US
            self.cpu_s += heavy.computes * PART_US / 1e6

    def open_outlet(self, newcomer: WorkerId) -> tuple[SimulatedState, SimulatedLine, str]:
        """Return the state for ``newcomer``, the line to it, and its address."""
        return opened(self, newcomer)

    def script_state(self) -> bytes:
        """Return nothing: a simulated script has no state of its own."""
        return b""

    def hash_state(self, step: int) -> None:
        """Send the hash of the state after ``step``."""
        self.send(StateHash(self.rank, step, self.shared.digest()))

    def watch_state(self) -> None:
        """Watch what the script changes from now on."""
        self.shared.watch()

    def finish(self) -> None:
        """Do nothing: hashes are made in no time."""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> dict[Datum, Any]:
        """Return what ``instruction`` provides, in exact numbers, and tell the watcher."""
        if self.shared.applies is not None:
            return self.shared.follow(instruction.step)
        if self.replays:  # here, since nobody waits for it
            made = self.numbers.compute(instruction, have, boundary_only)
            if instruction.op is Op.STEP:
                (weight,) = made.values()
                self.cluster.watcher.replayed(self, instruction.step, weight)
            self.reach("after", self.seat, instruction)
            return made
        if instruction.op is Op.STEP:
            norm = have.get(of_layers("norm", self.seat, instruction.step))
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
        """Return the sum of a REDUCE or TIE, made as a collective (lab/simulator/simulated_sums.py)."""
        total = (
            yield from simulated_sums.reduced(self, instruction, have, holder)
            if instruction.op is Op.REDUCE
            else simulated_sums.tied(self, instruction, have)
        )
        if self.lockstep is not None:
            yield from self.lockstep.begin_sum(instruction)
        if instruction.op is Op.REDUCE and holder is None:
            self.numbers.forget_sums()
        return total

    def set_for(self, step: int) -> None:
        """Set what the script sets for ``step``."""
        self.numbers.rate = rate(step, self.cluster.scenario.by_hand)

    def change_for(self, step: int) -> None:
        """Change a moment in place, as a script may before ``step``; changing it twice gives another result."""
        moments = self.numbers.moments
        self.numbers.unchanged = step, tuple(moments.values())
        moments[MOMENTS[0]] = (5 * moments[MOMENTS[0]] + step) % PRIME

    def go_by(self, share: LiveShare) -> None:
        """Set which share of the replicas contributes from now on."""
        self.numbers.contributing = share

    def share(self, step: int, have: StepStore) -> float:
        """Return this stage's share of the squared norm of ``step``."""
        return self.numbers.share(step, have)

    def norm(self, shares: Any) -> float:
        """Return the norm over all stages from the share of each."""
        return self.numbers.norm(shares)

    def number(self, loss: int) -> Any:
        """Return the loss as a wire makes it if a framework logs more of it, so that the last stage is told each."""
        return [loss, {}]

    def undo(self, step: int) -> None:
        """Take the last step back."""
        self.cluster.exercised[ProtocolRule.TAKEN_BACK] += 1
        self.numbers.taken_back()

    def forget_sums(self, after: int) -> None:
        """Drop the weight gradients that were added up here."""
        self.cluster.watcher.voided(self, after)
        self.numbers.forget_sums()
