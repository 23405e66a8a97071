"""The lockstep of the shards of one seat: they begin together what only all of them can do, and they stop at one place.

They run the same programs, each on its part of the stage. A failure elsewhere stops each at an instruction of its own,
and all have to go on from the same one, with the same data.

* *Joint* are: F, I and B, in which shards exchange parts of activations and gradients; STEP, so that no shard is on new
  weights while another may lack the sum; what makes the sum of a REDUCE or a TIE count; a program's beginning; and
  taking up a generation. A shard announces a joint action and waits for the others' word on it. Once all have announced
  it, all do it, whatever they hear meanwhile. So all finish it, unless one dies, and then they are given up together.
  If one has stopped before, none does it.
* A shard that stops says after which instruction, and goes on to where the furthest has got. Nothing joint lies
  between: a shard that has finished a joint action knows that all have begun it. LOAD, W and SEND need nobody. RECV and
  VALIDATE wait for others, which may be lost, so they are left out. Nothing that the furthest has finished needs them,
  since all that does is joint; and what one shard has left out the seat does not hold
  (core/coordinator/facts/shards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from recycle_plugin.core.messages.activity import WAITS, Activity, Awaited
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, Instruction, Op
from recycle_plugin.core.worker.control_view import ControlPort
from recycle_plugin.core.worker.executor import Interrupted, Waits

T = TypeVar("T")
JOINT = frozenset({Op.F, Op.I, Op.B, Op.STEP})  # as they begin
SUMS = frozenset({Op.REDUCE, Op.TIE})  # as they end
LEFT_OUT = RECEIVES | {Op.LOAD, Op.VALIDATE}  # if what they wait for is not there


class Word(NamedTuple):
    """The last word of a shard to the others of its seat. It begins, or has begun, ``what``, the ``joint``-th joint
    action of ``generation``; action 0 is to take the generation up. ``stopped``: after so many instructions of that
    generation; None if it goes on. It takes up no generation older than ``past``.
    """

    generation: int = -1
    joint: int = 0
    what: str = ""
    stopped: int | None = None
    past: int = -1


class SeatPort(ControlPort, Protocol):
    """How a shard waits, and talks to the others of its seat."""

    def wait(self, what: Awaited, ready: Callable[[], T | None], interruptible: bool = True) -> Waits[T]:
        """Yield until ``ready()`` is not None, the value. Raises JobEnded, and Interrupted if ``interruptible``."""

    def say_in_seat(self, word: Word) -> None:
        """Send ``word`` to the other shards, in order."""

    def heard_in_seat(self, shard: int) -> Word:
        """Return the last word of another shard."""


class Lockstep:
    """The lockstep of ``shard`` of ``seat``, one of ``shards``. ``finished``: instructions of this generation."""

    def __init__(self, port: SeatPort, seat: Seat, shard: int, shards: int) -> None:
        self._port, self._view, self._seat = port, port.control_view, seat
        self._others = [other for other in range(shards) if other != shard]
        self._word = Word()
        self._until: int | None = None  # where all stop
        self.finished = 0

    # --- together ----------------------------------------------------------------------------------

    def begin_sum(self, instruction: Instruction) -> Iterator[Any]:
        """Return when all shards have the sum of ``instruction``. Raises Interrupted if one stopped before."""
        yield from self.begin(f"the sum of {instruction}")

    def begin(self, what: str) -> Iterator[Any]:
        """Return when all shards begin ``what``. Raises Interrupted if one stopped before."""
        self._say(joint=self._word.joint + 1, what=what)
        if not (yield from self._all_begin()):
            yield from self.stop()
            raise AssertionError(f"a shard of seat {self._seat} has got past {what}, which it has not begun")

    def take_up(self, generation: int) -> Waits[bool]:
        """Take ``generation`` up with the others; the value is whether all do."""
        before = self._word
        self._say(generation=generation, joint=0, what=f"generation {generation}", stopped=None)
        if not (yield from self._all_begin()):
            self._word = before._replace(past=self._word.past)
            return False
        self.finished, self._until = 0, None
        return True

    def _all_begin(self) -> Waits[bool]:
        wait = Activity(WAITS, f"the other workers of seat {self._seat} at {self._word.what}", self._seat)
        return (yield from self._port.wait(wait, self._begun, interruptible=False))

    def _begun(self) -> bool | None:
        """Return whether all have begun this shard's action; None while another shard still may."""
        mine, waits = self._word, False
        for word in map(self._port.heard_in_seat, self._others):
            if word.generation == mine.generation and word.joint >= mine.joint:
                if word.joint == mine.joint and word.what != mine.what:
                    raise AssertionError(
                        f"the shards of seat {self._seat} are apart: one is at {mine.what}, another at {word.what}"
                    )
            elif word.past > mine.generation:
                return False
            else:
                waits = True
        return None if waits else True

    # --- stopping ----------------------------------------------------------------------------------

    @property
    def stops(self) -> bool:
        """Whether this shard only goes on to where the furthest has got."""
        return self._until is not None

    def come_to(self) -> Iterator[Any]:
        """If the membership has changed, return only if another shard has got further. Raises Interrupted."""
        if self.stops or self._view.interruption() is not None:
            yield from self.stop()

    def stop(self) -> Iterator[Any]:
        """Return if another shard has got further, else raise Interrupted."""
        if self._until is None:
            coming = self._view.interruption()
            known = [self._port.heard_in_seat(other).past for other in self._others]
            self.say_stopped(max([*known, *([coming.number] if coming is not None else [])]))
            yield from self._port.wait(
                f"the membership change that has stopped the other workers of seat {self._seat}",
                self._view.interruption,
                interruptible=False,
            )
            wait = Activity(WAITS, f"the other workers of seat {self._seat} to stop", self._seat)
            self._until = yield from self._port.wait(wait, self._furthest, interruptible=False)
        if self.finished >= self._until:
            coming = self._view.interruption()
            raise Interrupted(f"generation {coming.number}: {coming.cause}" if coming is not None else "")

    def say_stopped(self, past: int) -> None:
        """Tell the other shards that this shard has stopped at its present instruction, for generation ``past``."""
        self._say(stopped=self.finished, past=max(past, self._word.past))

    def pass_over(self, past: int) -> None:
        """Tell the other shards that this shard adopts no generation older than ``past``."""
        if past > self._word.past:
            self._say(past=past)

    def _furthest(self) -> int | None:
        """Return how far the furthest of the reporting shards has got; None while one has not said it."""
        coming, furthest = self._view.interruption(), self.finished
        for other in self._others:
            word = self._port.heard_in_seat(other)
            if coming is not None and coming.roster.holder(self._seat, other) is None:
                continue  # it has left: all that it has run is committed
            if word.generation != self._word.generation or word.stopped is None:
                return None
            furthest = max(furthest, word.stopped)
        return furthest

    def _say(self, **changes: Any) -> None:
        self._word = self._word._replace(**changes)
        self._port.say_in_seat(self._word)
