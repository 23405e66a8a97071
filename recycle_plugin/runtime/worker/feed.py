"""Where a worker's micro-batches come from: a source addressed by step and micro-batch, or the script's plain iterator
(core/vocabulary/iterator_draws.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.iterator_draws import Batches, Place
from recycle_plugin.core.worker.iterator_data import IteratorData
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.port import Tensors
from recycle_plugin.runtime.stage.ports import Source
from recycle_plugin.runtime.worker import iterator_places
from recycle_plugin.runtime.worker.data import ScriptsIterator
from recycle_plugin.runtime.worker.iterator_states import IteratorStates


class Feed:
    """Provides one worker's micro-batches; those of an iterator go to its ``store``.

    ``reads``: its stage needs data. ``next_batch(what)`` reads the iterator. ``hand_on(datum, batch, taker)`` sends a
    copy of a batch to a peer. ``rests``: nobody runs micro-batches of a replica that is out. ``source``: None to read
    the iterator. ``settled``: a step was trained, so the origin of data is fixed.
    """

    def __init__(
        self,
        session: Session,
        store: StepStore,
        reads: bool,
        next_batch: Callable[[str], Any],
        hand_on: Callable[[Datum, Tensors, Seat], None],
        rests: bool = False,
    ) -> None:
        self._session, self._store, self._rests = session, store, rests
        self.reads = reads
        self.states = IteratorStates(session)
        iterator = ScriptsIterator(session, next_batch, self.states)
        self.iterator_data = (
            IteratorData(store, iterator, hand_on, self._say_dealt, self._say_stays_out) if reads else None
        )
        if self.iterator_data is not None and session.view.newcomer:
            self.iterator_data.in_place = False
        self._last_given: object = None
        self._begun = False  # the script has given its first iterator
        # how many batches the iterator had given when the loaded checkpoint was saved, and its state then
        self._had = 0
        self._state: bytes | None = None
        self.source: Source | None = None
        self.settled = False

    def begin(self) -> None:
        """Prepare for a step. Report once if data comes from plain iterators."""
        self._store.reads_iterator = self.source is None
        if self._store.reads_iterator and self.reads and not self.settled and self._session.view.is_first:
            self._session.note(
                "data",
                "data comes from plain iterators: a step that a loss interrupts is finished with its own data, "
                + (
                    "or without the lost replica's; while a replica is out, its iterator rests; "
                    if self._rests
                    else "after that the survivors' iterators give the lost replica's share; "
                )
                + "engine.set_data_source() would keep every step's data, and needs no replica with both ends alive",
            )
        self.settled = True

    def given(self, data_iter: object, step: int) -> bool:
        """Record which iterator the script gives for ``step``. Returns whether it is another one, or begins anew."""
        if self._last_given is data_iter:
            return False
        if self.iterator_data is not None and self._last_given is not None:
            self.iterator_data.begin_another(step)
        self._last_given = data_iter
        return True

    def data_ended(self, step: int) -> None:
        """Record that the script hears, before ``step``, of all iterators' end: the next is another, or begins anew."""
        self._last_given = None
        if self.iterator_data is not None:
            self.iterator_data.begin_another(step)

    def go_on(self) -> None:
        """Bring the script's first iterator to its position at the time of the checkpoint, if that is asked for."""
        if self.iterator_data is None or self._begun:
            return
        self._begun = True
        if self._session.view.newcomer:
            self.states.begin_as_predecessor()
        elif self._state is None:
            self.states.begin(0, self.states.state())
        elif self.states.present is None:
            raise RecycleError(
                "recycle.resume_iterators: the checkpoint has the state of a data iterator, and the script gives one "
                "without load_state_dict(): give it the kind that it had when the checkpoint was saved, the loader "
                "itself and not iter(…) of it, or set recycle.resume_iterators to false"
            )
        else:
            self.states.set(self._had, self._state)
            self.states.begin(self._had, self._state)
        if self._had or self._state is not None:
            self.iterator_data.skip_to(Place(1, self._had))

    def write_place(
        self, replicas: int, size: int, add: Callable[[Path, Callable[[Any], object]], None], folder: Path
    ) -> None:
        """Add the position of this worker's plain iterator to the checkpoint ``folder``, by ``add(path, into)``. Do
        nothing without one that is at its replica's place. ``replicas``: of the job; ``size``: samples of a batch.
        """
        data, seat = self.iterator_data, self._store.seat
        if data is None or not data.in_place or not self._store.reads_iterator:
            return
        place = iterator_places.IteratorPlace(seat.replica, replicas, data.stands.read, size, data.stands.iterator)
        iterator_places.write(add, folder, seat, place, self.states.state())

    def resume(self, folder: Path, replicas: int, size: int, wanted: bool) -> None:
        """Take the iterators' positions from the checkpoint ``folder`` if ``wanted``; else report if a script that
        skips the same on all replicas would be wrong. Raises RecycleError if they are wanted and not known.
        """
        places = iterator_places.read(folder)
        given = {replica: place.read for replica, place in sorted(places.items())}
        own = places.get(self._store.seat.replica)
        state = iterator_places.state(folder, self._store.seat.replica)
        if state is not None and not wanted:
            self._say_first(
                "the checkpoint has the states of its data iterators, but the script has to place them itself: "
                "recycle.resume_iterators lets the plugin call load_state_dict() with them"
            )
        elif state is not None and own is not None and (own.replicas, own.size) == (replicas, size):
            self._had, self._state = own.read, state
        elif places and wanted:
            resumed = iterator_places.resumed(places, replicas, size)
            self._had = resumed.read[self._store.seat.replica]
            self._say_first(resumed.change)
        elif len(set(given.values())) > 1:
            self._say_first(
                f"when the checkpoint was saved, the iterators of its replicas had given "
                f"{iterator_places.shown(given)} batches, unevenly, since workers were missing: "
                "a script that skips the same number on each uses samples twice "
                "or never; recycle.resume_iterators lets each go on at its own place"
            )

    def _say_first(self, text: str) -> None:
        if text and self._session.view.is_first:
            self._session.note("data", text)

    def batch(self, step: int, micro_batch: MicroBatch) -> Any:
        """Return a micro-batch's batch from the source."""
        assert self.source is not None, "the iterator is read"
        return self.source(step, micro_batch)

    def _say_stays_out(self, why: str) -> None:
        seat = self._store.seat
        self._session.note(
            "data",
            f"seat {seat}, which has come back, {why}: replica {seat.replica} gives no data, and the others' "
            "iterators give its share; engine.set_data_source() has no such limit",
            seat=str(seat),
        )

    def _say_dealt(self, step: int, retired: set[int], dealt: Batches) -> None:
        names, by = (
            ", ".join(map(str, sorted(retired))),
            ", ".join(map(str, sorted({draw.source for draw in dealt.values()}))),
        )
        self._session.note(
            "data",
            f"from step {step} on the share of replica {names}, {len(dealt)} micro-batches a step, is drawn from the "
            f"iterators of replica {by}",
            step=step,
            replicas=sorted(retired),
            drawn={str(one): str(draw) for one, draw in sorted(dealt.items())},
        )
