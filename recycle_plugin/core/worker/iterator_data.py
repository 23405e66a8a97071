"""The handling of a plain iterator by a worker of the first or last stage: draw, hand on, keep.

The rules: core/vocabulary/iterator_draws.py.

What is drawn is in the worker's store, as data of kind ``drawn`` of its stage, until the step is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Batches, Draw, Gone, IteratorState, Share, pack, share
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.step_store import StepStore

KIND = "drawn"


class DataIterator(Protocol):
    """An iterator whose ``next`` gives a batch, inputs and labels."""

    def read(self, step: int, position: int, draw: Draw | None) -> Any:
        """Reads the next batch, in ``step`` the ``position``-th; returns it as it is kept where it is ``draw``.
        ``draw`` is None where nobody needs it.
        """

    def skip(self, number: int, until: int) -> None:
        """Reads batch ``number``, which its replica has had, on the way to batch ``until``."""

    def draw_of(self, batch: Any) -> Draw:
        """The draw that ``batch`` came from."""


class IteratorData:
    """The iterator data of the worker whose ``store`` it is.

    ``hand_on(datum, batch, taker)`` gives a copy to a peer; ``say(step, retired, dealt)`` tells the user which replicas
    are no sources any more, and what is drawn in their place; ``stays_out(why)``: that a newcomer's is none.
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
        self.iterators = 1  # which the script has given, one after the other
        self._begun_in = 0  # the step for which it has given the last one
        self._store, self._iterator, self._hand_on, self._say = store, iterator, hand_on, say
        self._read_so_far: dict[int, int] = {}  # how often the iterator was asked in a step
        self._read_in_all = 0
        self._taken: IteratorState | None = None
        self._usual: Share | None = None  # of a step of which nobody has anything yet
        self._said: set[int] = set()
        self.in_place = True  # the iterator stands where its replica does
        self._said_out = False

    def held_draws(self) -> dict[str, str]:
        """The draws whose batches are here, by step, packed for the others (core.vocabulary.iterator_draws.pack)."""
        found: dict[int, dict[MicroBatch, Draw]] = {}
        for datum in self._store:
            if datum.kind == KIND and datum.step > 0:
                found.setdefault(datum.step, {})[datum.made_of] = self._iterator.draw_of(self._store[datum])
        return pack(found)

    @property
    def _iterator_state(self) -> IteratorState:
        assert self._taken is not None, "nobody has said yet where the iterators are"
        return self._taken

    def take_state(self, iterator_state: IteratorState, stepped: int = 0) -> None:
        """Goes by ``iterator_state`` from now on, until the next one comes.  ``stepped``: the last step that is applied
        here.
        """
        self._taken, self._usual = iterator_state, None
        if not self.in_place and self._store.reads_iterator:
            self._find_place(iterator_state, stepped)

    def _find_place(self, iterator_state: IteratorState, stepped: int) -> None:
        """Reads up to where the other end of the replica stood behind step ``stepped``, if that is known: what it has
        drawn since is to be drawn here too, where the stage was replayed.
        """
        seat, last = self._store.seat, iterator_state.plan.stages - 1
        other = Seat(seat.replica, last - seat.stage)
        if self.iterators > 1:
            why = f"was given {self.iterators} iterators by its script, and nobody knows how far the last was read"
        elif other == seat:
            why = "is both ends of its replica, and nobody else knows how far its iterator was read"
        elif iterator_state.read is None or other not in iterator_state.read:
            why = f"does not know how far its iterator was read, as seat {other} was lost too"
        else:
            since = (
                1 + max([draw.position for draw in batches.values() if draw.source == seat.replica], default=-1)
                for step, batches in iterator_state.held_draws.get(other, {}).items()
                if step > stepped
            )
            self.skip_to(iterator_state.read[other] - sum(since))
            self.in_place = True
            return
        if not self._said_out:
            self._said_out = True
            self._stays_out(why)

    def provide(self, step: int, control_view: ControlView) -> None:
        """Draws what this worker has to draw for ``step``, and sends what others lack, before anything of the step is
        run.

        Raises :class:`core.vocabulary.iterator_draws.Gone` where data can't be had any more.
        """
        if not self._store.reads_iterator or control_view.is_committed(step):
            return  # by the others, who did not need what is here
        shared, seat = self._share(step), self._store.seat
        self._say_dealt(step, shared.dealt)
        for draw, micro_batch in shared.of(seat):
            if self._here(step, micro_batch) not in self._store:
                self._draw(step, micro_batch, draw)
        for transfer in shared.transfers:
            if transfer.giver == seat:
                self._hand_on(
                    Datum(KIND, transfer.taker.stage, transfer.micro_batch, step),
                    self._store[self._here(step, transfer.micro_batch)],
                    transfer.taker,
                )

    def giver(self, datum: Datum) -> Seat:
        """The seat that a batch comes from which this worker does not draw."""
        seat = self._store.seat
        transfers = self._share(datum.step).transfers
        return next(
            (one.giver for one in transfers if one.taker == seat and one.micro_batch == datum.micro_batch), seat
        )

    def batches_read(self) -> int:
        """The number of batches that the iterator has given so far."""
        return self._read_in_all

    @property
    def place(self) -> int | None:
        """The number of batches that the iterator has given, where it stands at its replica's place."""
        return self._read_in_all if self.in_place else None

    def skip_to(self, read: int) -> None:
        """Brings the iterator to where it stood when it had given ``read`` batches.  Raises ValueError where it is past
        that.
        """
        if read < self._read_in_all:
            raise ValueError(
                f"the data iterator of seat {self._store.seat} has given {self._read_in_all} batches, "
                f"and is to stand behind {read}: it can't be read again; pass one that begins anew"
            )
        while self._read_in_all < read:
            self._iterator.skip(self._read_in_all + 1, read)
            self._read_in_all += 1

    def begin_another(self, step: int) -> None:
        """Takes in that the script gives another iterator, from ``step`` on."""
        self.iterators += 1
        self._begun_in = step

    def rewind(self) -> None:
        """Goes on from a checkpoint that everybody has loaded, whose steps' data is read as if for the first time."""
        self._read_so_far = {}

    def _share(self, step: int) -> Share:
        if (
            any(step in batches for batches in self._iterator_state.held_draws.values())
            or step in self._iterator_state.recovery_plans
        ):
            return share(self._iterator_state, step)
        if self._usual is None:
            self._usual = share(self._iterator_state, step)
        return self._usual

    def _draw(self, step: int, micro_batch: MicroBatch, draw: Draw) -> None:
        if step < self._begun_in:  # at the other end it might be read of the one before: inputs and labels of two
            raise Gone(
                f"batch {draw} of step {step} is lost with all that was computed of it, and seat {self._store.seat} "
                f"has had another iterator since step {self._begun_in}: nobody can read it again. "
                "engine.set_data_source() keeps every step's data"
            )
        if self._read_so_far.get(step, 0) > draw.position:
            raise AssertionError(
                f"seat {self._store.seat} is to draw {draw} of step {step} for micro-batch {micro_batch}, and has "
                "drawn past that"
            )
        while (count := self._read_so_far.get(step, 0)) <= draw.position:
            batch = self._iterator.read(step, count, draw if count == draw.position else None)
            self._read_so_far = {step: count + 1}
            self._read_in_all += 1
        self._store.put(self._here(step, micro_batch), batch)

    def _here(self, step: int, micro_batch: MicroBatch) -> Datum:
        return Datum(KIND, self._store.seat.stage, micro_batch, step)

    def _say_dealt(self, step: int, dealt: Batches) -> None:
        """Tells the user of each replica that is no source any more, once, by one of the first stage's workers."""
        first = min(seat for seat in self._iterator_state.plan.view.live if seat.stage == 0)
        retired = {one.replica for one in dealt} - self._said
        if self._store.seat == first and retired:
            self._said |= retired
            self._say(step, retired, dealt)
