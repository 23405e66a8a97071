"""The handling of a plain iterator by a worker of the first or last stage: draw, hand on, keep (the rules:
core/vocabulary/iterator_draws.py). Drawn batches are in the worker's store, as ``drawn``, until the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import (
    Batches,
    Draw,
    Ended,
    Gone,
    IteratorState,
    Lacking,
    Place,
    StepDraws,
    pack,
    share,
)
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.step_store import StepStore

KIND = "drawn"
UNCOMMITTED = 2  # steps at most that may have to be done again
KEPT = UNCOMMITTED + 1  # steps' draws: of those, and of any other


class DataIterator(Protocol):
    """A data iterator. One ``next`` returns one batch: inputs and labels."""

    def read(self, step: int, position: int, draw: Draw | None) -> Any:
        """Read the next batch, the ``position``-th of ``step``; return it as it is kept for ``draw``, which is None if
        nobody needs it. Raises Ended if there is none.
        """

    def skip_to(self, place: Place, read: int) -> None:
        """Bring the iterator, which has given ``read`` batches, to ``place``: its replica has had those between."""

    def draw_of(self, batch: Any) -> Draw:
        """Return the draw that ``batch`` came from."""


class IteratorData:
    """The iterator data of the worker with ``store``. ``hand_on(datum, batch, taker)`` sends a copy to a peer.
    ``say(step, retired, dealt)`` tells the user which replicas are no longer sources, and what is drawn in their place.
    ``stays_out(why)``: that a newcomer's replica is none.
    """

    def __init__(
        self,
        store: StepStore,
        iterator: DataIterator,
        hand_on: Callable[[Datum, Any, Seat], None],
        say: Callable[[int, set[int], Batches], None],
        stays_out: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._stays_out = stays_out
        self._begun_in = 0  # the step for which the script has given its last iterator
        self._store, self._iterator, self._hand_on, self._say = store, iterator, hand_on, say
        self._read_so_far: dict[int, int] = {}  # how often the iterator was asked in a step
        self.stands = Place()
        self._behind = [(-1, self.stands)]  # recent steps, and where it stood when all was drawn for them
        self._taken: IteratorState | None = None
        self._shared: dict[tuple[int, int], StepDraws] = {}  # by step and iterator; 0: that nobody has data of yet
        self._said: set[int] = set()
        self._ended = 0  # the number of the last iterator that has
        self.lacks = 0  # the step for which there is nothing to draw, as far as is known here
        self.in_place = True  # the iterator stands where its replica does
        self._said_out = False

    def held_draws(self) -> dict[str, str]:
        """Return the draws whose batches this worker holds, by step, packed by core.vocabulary.iterator_draws.pack."""
        found: dict[int, dict[MicroBatch, Draw]] = {}
        for datum in self._store:
            if datum.kind == KIND and datum.step > 0:
                found.setdefault(datum.step, {})[datum.made_of] = self._iterator.draw_of(self._store[datum])
        return pack(found)

    @property
    def _iterator_state(self) -> IteratorState:
        assert self._taken is not None, "the iterators' places are not known yet"
        return self._taken

    def take_state(self, iterator_state: IteratorState) -> None:
        """Use ``iterator_state`` until the next call."""
        self._taken, self._shared, self.lacks = iterator_state, {}, 0
        if not self.in_place and self._store.reads_iterator:
            self._find_place(iterator_state)

    def _find_place(self, iterator_state: IteratorState) -> None:
        """Read up to the replica's place, if that is known."""
        place = iterator_state.places.get(self._store.seat.replica)
        if place is None:
            why = "does not know how far its iterator was read, as all workers with its last batches were lost together"
        elif place.iterator > self.stands.iterator:
            why = f"was given {self.stands.iterator} iterators by its script, but its replica had read {place.iterator}"
        else:
            self.skip_to(place)
            self.in_place = True
            return
        if not self._said_out:
            self._said_out = True
            self._stays_out(why)

    def provide(self, step: int, control_view: ControlView) -> None:
        """Make this worker's draws for ``step``, and send what others lack, before anything of the step runs.

        Raises :class:`core.vocabulary.iterator_draws.Gone` if data is lost, and
        :class:`core.vocabulary.iterator_draws.Lacking` if the iterator, or all sources' iterators, have ended.
        """
        if not self._store.reads_iterator or control_view.is_committed(step):
            return  # by the others, who did not need what is here
        seat = self._store.seat
        try:
            shared = self._share(step)
            self._say_dealt(step, shared.dealt)
            for draw, micro_batch in shared.of(seat):
                if self._here(step, micro_batch) not in self._store:
                    self._draw(step, micro_batch, draw)
        except Lacking:
            self.lacks = step
            raise
        finally:
            self._note_place(step)
        for transfer in shared.transfers:
            if transfer.giver == seat:
                self._hand_on(
                    Datum(KIND, transfer.taker.chunk, transfer.micro_batch, step),
                    self._store[self._here(step, transfer.micro_batch)],
                    transfer.taker,
                )

    def giver(self, datum: Datum) -> Seat:
        """Return the seat that sends a batch which this worker does not draw."""
        seat = self._store.seat
        transfers = self._share(datum.step).transfers
        return next(
            (one.giver for one in transfers if one.taker == seat and one.micro_batch == datum.micro_batch), seat
        )

    def place_behind(self, step: int) -> Place | None:
        """Return where the iterator stood when all was drawn for ``step``; None if it is not at its replica's place."""
        return next(place for at, place in reversed(self._behind) if at <= step) if self.in_place else None

    def places(self, stepped: int) -> dict[str, Place]:
        """Return by step the place behind ``stepped``, and the next if begun; empty if not at the replica's place."""
        behind = self.place_behind(stepped)
        if behind is None:
            return {}
        return {str(stepped): behind} | {str(step): place for step, place in self._behind if step > stepped}

    def skip_to(self, place: Place) -> None:
        """Bring the iterator to ``place``; if the place is in a later iterator, to that iterator's beginning. Raises
        ValueError if it is past ``place``.
        """
        number, read = self.stands
        until = place.read if place.iterator == number else 0
        if until < read:
            raise ValueError(
                f"the data iterator of seat {self._store.seat} has given {read} batches, "
                f"but training goes on after {until}: it can't go back; pass an iterator that begins anew"
            )
        self.stands = Place(number, until)
        self._iterator.skip_to(self.stands, read)
        self._behind = [(-1, self.stands)]

    def begin_another(self, step: int) -> None:
        """Record that the script gives another iterator, from ``step`` on."""
        self.stands = Place(self.stands.iterator + 1)
        self._begun_in, self.lacks = step, 0

    @property
    def ended(self) -> int:
        """The number of the iterator if it has ended, else 0."""
        return self._ended if self._ended == self.stands.iterator else 0

    def leave_out(self, step: int) -> None:
        """Drop the draws for ``step``, which can't be filled: all iterators have ended."""
        self._store.drop_draws(step)
        self._read_so_far.pop(step, None)
        self.lacks = step  # others may have to hear it once more
        self._behind = [(at, place) for at, place in self._behind if at < step]

    def rewind(self) -> None:
        """Go on from a checkpoint that all have loaded; its steps' data is read as if for the first time."""
        self._read_so_far = {}
        self._behind = [(-1, self.stands)]

    def _note_place(self, step: int) -> None:
        """Record where the iterator stands once all is drawn for ``step``, which is final when the next step begins."""
        if step > self._behind[-1][0]:
            self._behind = [*self._behind[-UNCOMMITTED:], (step, self.stands)]
        elif step == self._behind[-1][0]:
            self._behind[-1] = (step, self.stands)

    def _share(self, step: int) -> StepDraws:
        """Return the draws of ``step``, shared out once for each state and iterator."""
        state, iterator = self._iterator_state, self.stands.iterator - (step < self._begun_in)
        begun = step in state.recovery_plans or any(step in batches for batches in state.held_draws.values())
        case = step if begun else 0, iterator
        if case not in self._shared:
            shared = share(state, step, iterator)
            self._shared = dict([*self._shared.items(), (case, shared)][-KEPT:])
        return self._shared[case]

    def _draw(self, step: int, micro_batch: MicroBatch, draw: Draw) -> None:
        if step < self._begun_in:  # the other end might read from the iterator before: inputs and labels of two
            raise Gone(
                f"batch {draw} of step {step} is lost with all results computed from it, and seat {self._store.seat} "
                f"has had another iterator since step {self._begun_in}: the batch can't be read again. "
                "engine.set_data_source() keeps every step's data"
            )
        if self._read_so_far.get(step, 0) > draw.position:
            raise AssertionError(
                f"seat {self._store.seat} is to draw {draw} of step {step} for micro-batch {micro_batch}, and has "
                "drawn past that"
            )
        while (count := self._read_so_far.get(step, 0)) <= draw.position:
            batch = self._read(step, count, draw if count == draw.position else None)
            self._read_so_far = {step: count + 1}
            self.stands = Place(self.stands.iterator, self.stands.read + 1)
        self._store.put(self._here(step, micro_batch), batch)

    def _read(self, step: int, position: int, draw: Draw | None) -> Any:
        try:
            return self._iterator.read(step, position, draw)
        except Ended as ended:
            if self.ended:
                raise Gone(
                    f"{ended}; the iterator at its replica's other end has more: both have to give the same data"
                ) from None
            self._ended = self.stands.iterator
            raise Lacking(str(ended)) from None

    def _here(self, step: int, micro_batch: MicroBatch) -> Datum:
        return Datum(KIND, self._store.seat.chunk, micro_batch, step)

    def _say_dealt(self, step: int, dealt: Batches) -> None:
        """Tell the user of each replica that is no longer a source, once, by one of the first stage's workers."""
        first = min(seat for seat in self._iterator_state.plan.view.live if seat.stage == 0)
        retired = {one.replica for one in dealt} - self._said
        if self._store.seat == first and retired:
            self._said |= retired
            self._say(step, retired, dealt)
