"""The lockstep of the shards of one seat: they begin together what only all of them can do, and they stop at one place.

They run the same programs, each on its part of the stage.  A failure elsewhere stops each at an instruction of its own,
and all have to go on from the same one, with the same data.

* *Joint* is what they do together: F, I and B, in which they exchange parts of activations and gradients; a STEP, so
  that none is on new weights while another may lack the sum; what makes the sum of a REDUCE or a TIE count; a program's
  beginning; and the taking up of a generation.  A shard says that it begins something joint, and waits for the others'
  word on it.  Once all have said that they begin it, all do it, whatever they hear meanwhile: so all of them finish it,
  unless one dies, and then they are given up together.  Where one has said that it has stopped before, none does it.
* Who stops says behind which instruction, and goes on to where the furthest has got.  Nothing joint lies between: who
  has finished that knows that all have begun it.  LOAD, W and SEND need nobody.  What waits for others may never come,
  where these are lost: RECV, VALIDATE.  It is left out then.  Nothing that the furthest has finished needs it, since
  all that does is joint, and what one has left out the seat does not hold (core/coordinator/facts/shards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, Instruction, Op
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Interrupted, Waits

T = TypeVar("T")
JOINT = frozenset({Op.F, Op.I, Op.B, Op.STEP})  # as they begin
SUMS = frozenset({Op.REDUCE, Op.TIE})  # as they end
LEFT_OUT = RECEIVES | {Op.LOAD, Op.VALIDATE}  # where what they wait for is not there


class Word(NamedTuple):
    """The last word of a shard to the others of its seat.

    It has begun, or begins, the ``joint``-th joint thing of ``generation``, ``what``; the first, 0, is to take that up.
    ``stopped``: behind so many instructions of that generation, or None where it goes on.  It takes up none that is
    older than generation ``past``.
    """

    generation: int = -1
    joint: int = 0
    what: str = ""
    stopped: int | None = None
    past: int = -1


class SeatPort(Protocol):
    """The means by which a shard waits, and talks to the others of its seat."""

    @property
    def control_view(self) -> ControlView:
        """What this worker knows of the control plane."""

    def wait(
        self, what: Callable[[], str] | str, ready: Callable[[], T | None], interruptible: bool = True
    ) -> Waits[T]:
        """Yields until ``ready()`` is not None; that is the value.  Raises JobEnded, and Interrupted if
        ``interruptible``.
        """

    def say_in_seat(self, word: Word) -> None:
        """Sends ``word`` to the other shards, in order."""

    def heard_in_seat(self, shard: int) -> Word:
        """The last word of another shard."""


class Lockstep:
    """The lockstep of ``shard`` of ``seat``, which has so many ``shards``.  ``finished``: instructions of the
    generation that it has taken up.
    """

    def __init__(self, port: SeatPort, seat: Seat, shard: int, shards: int) -> None:
        self._port, self._view, self._seat = port, port.control_view, seat
        self._others = [other for other in range(shards) if other != shard]
        self._word = Word()
        self._until: int | None = None  # where all stop
        self.finished = 0

    # --- together ----------------------------------------------------------------------------------

    def begin_sum(self, instruction: Instruction) -> Iterator[Any]:
        """Returns when all shards have the sum of ``instruction``, a REDUCE or TIE.  Raises Interrupted where one has
        stopped before.
        """
        yield from self.begin(f"the sum of {instruction}")

    def begin(self, what: str) -> Iterator[Any]:
        """Returns when all shards begin ``what``.  Raises Interrupted where one has stopped before."""
        self._say(joint=self._word.joint + 1, what=what)
        if not (yield from self._all_begin()):
            yield from self.stop()
            raise AssertionError(f"a shard of seat {self._seat} has got past {what}, which it has not begun")

    def take_up(self, generation: int) -> Waits[bool]:
        """Takes ``generation`` up with the others; the value is whether all do."""
        before = self._word
        self._say(generation=generation, joint=0, what=f"generation {generation}", stopped=None)
        if not (yield from self._all_begin()):
            self._word = before._replace(past=self._word.past)
            return False
        self.finished, self._until = 0, None
        return True

    def _all_begin(self) -> Waits[bool]:
        return (
            yield from self._port.wait(
                lambda: f"the other workers of seat {self._seat} at {self._word.what}", self._begun, interruptible=False
            )
        )

    def _begun(self) -> bool | None:
        """Whether all have begun what this shard begins; None as long as one may still."""
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
        """Stops before the next instruction where the membership has changed, and the others have got no further.
        Raises Interrupted.
        """
        if self.stops or self._view.interruption() is not None:
            yield from self.stop()

    def stop(self) -> Iterator[Any]:
        """Returns where another shard has got further, or raises Interrupted."""
        if self._until is None:
            coming = self._view.interruption()
            known = [self._port.heard_in_seat(other).past for other in self._others]
            self.say_stopped(max([*known, *([coming.number] if coming is not None else [])]))
            yield from self._port.wait(
                f"what has stopped the others of seat {self._seat}", self._view.interruption, interruptible=False
            )
            self._until = yield from self._port.wait(
                f"the other workers of seat {self._seat} to stop", self._furthest, interruptible=False
            )
        if self.finished >= self._until:
            coming = self._view.interruption()
            raise Interrupted(f"generation {coming.number}: {coming.cause}" if coming is not None else "")

    def say_stopped(self, past: int) -> None:
        """Says that this shard has stopped where it is, for generation ``past``."""
        self._say(stopped=self.finished, past=max(past, self._word.past))

    def pass_over(self, past: int) -> None:
        """Says that this shard takes up no generation before ``past``."""
        if past > self._word.past:
            self._say(past=past)

    def _furthest(self) -> int | None:
        """How far the furthest has got, of those that are to report; None as long as one has not said it."""
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
