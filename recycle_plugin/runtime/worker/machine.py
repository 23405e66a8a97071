"""The machine that a real worker runs on (core.worker.machine.Machine): a clock, a connection to the coordinator, and a
mover of tensors to its peers.

Waits block, by name and with a deadline. A membership change takes effect only between two instructions, or breaks a
wait.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch

from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, Awaited, awaited
from recycle_plugin.core.messages.from_workers import Missing, Serving
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.faults import Fault, FaultScript
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import COMPUTE, SENDS, STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.losses import Loss
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.span import Span
from recycle_plugin.core.worker.catching_up import Inlet
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.lockstep import Lockstep, Word
from recycle_plugin.core.worker.loop_ports import StepProgram
from recycle_plugin.core.worker.pushed import Script
from recycle_plugin.core.worker.serving import Outlet, SharedState
from recycle_plugin.core.worker.shares import Word as ShareWord
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.catch_up.transfers import Transfers
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import There
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.movers.batches import described, packed
from recycle_plugin.runtime.movers.mover import OF_REPLAYS, Mover
from recycle_plugin.runtime.movers.shares import carried, word_of
from recycle_plugin.runtime.stage.ports import Told
from recycle_plugin.runtime.state.background_hash import BackgroundHash
from recycle_plugin.runtime.state.units import StageUnits
from recycle_plugin.runtime.worker.operations import TorchOperations

T = TypeVar("T")
WORD = "word"  # kind of the data that workers of one seat exchange
OUTWARD = SENDS | STAGE_WIDE  # what a worker given up by the others must not do


class TorchMachine:
    """A real worker's machine: ``operations`` compute, ``mover`` moves tensors, ``session`` talks to the coordinator.

    ``faults`` strike at their instructions and points. ``transfers`` has the lines to newcomers, ``hashing`` hashes the
    state. ``units``: this worker's own, which a newcomer fills. ``script_state()``: what the script hands over to a
    newcomer's.
    """

    def __init__(
        self,
        session: Session,
        mover: Mover,
        operations: TorchOperations,
        faults: FaultScript,
        transfers: Transfers,
        hashing: BackgroundHash,
        units: StageUnits,
        script_state: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self.control_view, self._session = session.view, session
        self._mover, self.operations, self._faults = mover, operations, faults
        self._takers: set[str] = set()  # addresses that batches drawn here were sent to
        self._words: dict[int, Word] = {}  # the last word of each other worker of the seat
        self._of_replays: list[Tensors] = []
        self._come: deque[tuple[Datum, Any, int]] = deque()  # arrivals other than words
        self._script_state = script_state
        self._transfers, self.hashing, self.units = transfers, hashing, units

    def watch_state(self) -> None:
        """Watch for the script's changes of the state before the next step."""
        self.units.state.watch()

    def script_state(self) -> bytes:
        """Return the value that the script gives to a newcomer's script."""
        return self._script_state()

    # --- lines -------------------------------------------------------------------------------------

    def wait(
        self,
        what: Awaited,
        ready: Callable[[], T | None],
        interruptible: bool = True,
        at_least_s: float = 0.0,
    ) -> Waits[T]:
        """Block until ``ready()`` is not None; return it. Raises as Waiting.until, but not before ``at_least_s``."""
        return self._session.waiting.until(what, ready, interruptible, max(at_least_s, self._session.waiting.timeout_s))
        yield  # makes it a generator, as the loop wants

    def wait_for_commit(self, step: int) -> Iterator[Any]:
        """Block until ``step`` is committed."""
        self._session.waiting.for_commit(step)
        return iter(())

    def wait_for(self, datum: Datum, source: Seat, ready: Callable[[], T | None]) -> Waits[T]:
        """Block until ``datum`` has come from ``source``. After the deadline, report it to the coordinator, with
        whether this worker itself hears nobody; the coordinator has the datum sent again. Raises WaitTimeout if it
        still does not come.
        """
        session = self._session
        try:
            return session.waiting.until(lambda: awaited(datum, source), ready)
        except WaitTimeout:
            self._miss(str(datum), source if self._mover.hears() else None)
        return session.waiting.until(lambda: awaited(datum, source, again=True), ready)
        yield

    def transfer(self, datum: Datum, value: Any, target: Seat, valid_from: int) -> None:
        """Send a datum, valid from generation ``valid_from``, to the worker at ``target``."""
        address = self.control_view.roster.address(target, self.control_view.shard)
        if datum.kind == "drawn":
            self._takers.add(address)
            value = There(value)  # packed batches are on the host (runtime/movers/batches.py)
        self._mover.send(address, datum, value, valid_from)

    def arrivals(self) -> Iterator[tuple[Datum, Any, int]]:
        """Yield the data that has come from peers since the last call (core.worker.machine.Machine)."""
        self._take_words()
        while self._come:
            yield self._come.popleft()

    def _take_words(self) -> None:
        for datum, value, valid_from in self._mover.arrivals():
            if datum.kind == WORD:
                self._words[datum.stage] = Word(*described(value))
            elif datum.kind == OF_REPLAYS:
                self._of_replays.append(value)
            else:
                self._come.append((datum, value, valid_from))

    @property
    def has_words(self) -> bool:
        """Whether there are words on a replay that nobody has read yet."""
        self._take_words()
        return bool(self._of_replays)

    def words(self) -> list[ShareWord]:
        """Return the words on replays that have come since the last call."""
        self._take_words()
        found, self._of_replays = self._of_replays, []
        return [word_of(each) for each in found]

    def tell(self, address: str, word: ShareWord) -> None:
        """Send a word on a replay to the worker at ``address``, which may be gone."""
        datum, tensors = carried(word)
        self._mover.send(address, datum, There(tensors), 0)

    def say_in_seat(self, word: Word) -> None:
        """Send ``word`` to the other workers of this seat that this worker knows."""
        heard_in, view = self.control_view.heard_in, self.control_view
        own = heard_in.roster.member(view.worker) if heard_in is not None else None
        for other in heard_in.roster.group(own.seat) if heard_in is not None and own is not None else ():
            if other != own:
                self._mover.send(other.address, Datum(WORD, view.shard, None, 0), There(packed((), word)), 0)

    def heard_in_seat(self, shard: int) -> Word:
        """Return the last word of the seat's worker ``shard``."""
        self._take_words()
        return self._words.get(shard, Word())

    def keep_in_step(self, lockstep: Lockstep) -> None:
        """Let sums count only when all workers of the seat have them."""
        self.operations.agree = lambda instruction: deque(lockstep.begin_sum(instruction), maxlen=0)  # blocks

    def open_inlet(self, serving: Serving) -> Inlet:
        """Open the line from the source that ``serving`` names."""
        return self._transfers.come_from(serving.address)

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator."""
        self._session.send(message)

    def clock(self) -> float:
        """The time in seconds since the epoch."""
        return time.time()

    def open_outlet(self, newcomer: WorkerId) -> tuple[SharedState, Outlet, str]:
        """Return this stage's state for ``newcomer``, the line to it, and the address at which it is let in."""
        return self._transfers.to(newcomer)

    def listen_to(self, members: Iterable[str]) -> None:
        """Accept data from the workers at these addresses as well."""
        self._mover.listen_to(members)

    def keep_only(self, members: Iterable[str]) -> None:
        """Stop sending to all workers but those at these addresses."""
        self._mover.keep_only(members)

    def hear_out(self) -> None:
        """Before a membership change, receive all that lost peers have sent. Report it if this worker hears no peer."""
        coming = self.control_view.interruption()
        if coming is not None and not self._mover.hear_out(coming.roster.addresses):
            self._miss("what peers send", None)

    def _miss(self, what: str, source: Seat | None) -> None:
        """Tell the coordinator which data is missing from ``source``; None: this worker hears no peer."""
        session = self._session
        own = self.control_view.member
        if source is None and own is not None:
            source = own.seat
        if source is not None:  # else this worker is no member
            session.send(Missing(session.rank, session.view.number, what, str(source)))

    # --- instructions ------------------------------------------------------------------------------

    def now_us(self) -> int:
        """Microseconds since the epoch: one clock for all processes of a host, so that traces line up."""
        return time.time_ns() // 1000

    def waited_us(self) -> int:
        """Microseconds that the process has waited for others so far."""
        return self._session.waiting.waited_us

    @contextmanager
    def running(self, program: StepProgram) -> Iterator[Iterable[Instruction]]:
        """A context for a step's program: a membership change interrupts it, and is not handled in a collective."""
        between, self._session.hooks.between_steps = self._session.hooks.between_steps, None
        self.control_view.begun = max(self.control_view.begun, program.step)
        if (choice := self.operations.choice) is not None:
            choice.begin(program)
        try:
            yield program.instructions
            self.reach(f"step.end@{program.step}")
        finally:
            self._session.hooks.between_steps = between

    def begin(self, instruction: Instruction) -> None:
        """Report ``instruction`` in heartbeats. If others would see its effect, wait for the lease first."""
        if instruction.op in OUTWARD:
            self._wait_taken()
            self._session.waiting.for_lease(instruction)
        step, stepping = instruction.step, self.operations.stepping
        if step != stepping.prepared and step > 0 and instruction.op in COMPUTE:
            stepping.prepare(step, self.control_view.committed)
        was_at = self._session.heartbeats.turn_to((ELSEWHERE if instruction.op is Op.LOAD else COMPUTES, instruction))
        self._before = was_at, self._session.thread.turn_to(instruction)

    def end(self, instruction: Instruction) -> None:
        """Report the activity before the instruction again."""
        was_at, work = self._before
        self._session.thread.work = work
        self._session.heartbeats.turn_to(was_at)

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Do nothing: a real worker's instruction takes its time by itself."""
        return iter(())

    def add_up(self, instruction: Instruction, have: StepStore, holder: Seat | None) -> Waits[Any]:
        """Return the result of REDUCE or TIE; never yields."""
        return self.operations.add_up(instruction, have, holder)
        yield

    def record(self, span: Span) -> Iterable[Span]:
        """Record an instruction's time span on the host. Returns spans that are over on the device, in its time."""
        self._session.heartbeats.done += 1
        over, choice = self.operations.timeline.spans(span), self.operations.choice
        if choice is not None and choice.measuring:
            for each in over:
                choice.ran(each)
        return over

    def number(self, loss: Told) -> Loss:
        """Return a loss in Python's numbers."""
        if torch.is_tensor(loss):
            return float(fetch(loss, "a loss").item())
        numbers, sizes = loss
        own, *logged = fetch(numbers, "a loss").tolist()
        more = iter(logged)
        return own, {name: tuple(islice(more, size)) for name, size in sizes.items()}

    def reach(self, when: str, seat: Seat | None = None, instruction: Instruction | None = None) -> None:
        """Let a fault strike that is due at point ``when`` (core/vocabulary/faults.py), or around ``instruction``."""
        if not self._faults.pending:
            return
        fault = self._faults.due("at", when) if instruction is None else self._faults.due(when, str(instruction))
        if fault is not None:
            strike(fault, self._session)

    def _wait_taken(self) -> None:
        """Wait until all that was drawn here has copies elsewhere: only then may others see its effects."""
        if self._takers:
            self._mover.wait_sent(self._takers)
            self._takers.clear()


class PushedMachine(TorchMachine):
    """A machine on which F waits until its ``script`` has run the micro-batch forward and backward."""

    script: Script

    def watch_state(self) -> None:
        """Watch what the script changes. Its forwards touch all of the state, so it is recorded as touched at once."""
        super().watch_state()
        self.units.state.touched()

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        """Wait, for F, while the script runs it."""
        return self.script.passing() if instruction.op is Op.F else iter(())


def strike(fault: Fault, session: Session) -> None:
    """Report an injected fault, and let it happen to this process."""
    session.note(
        "fault", f"{fault} strikes process {os.getpid()}", fault=str(fault), seat=str(fault.seat), struck_at=time.time()
    )
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leave":
            os.kill(os.getpid(), signal.SIGTERM)
