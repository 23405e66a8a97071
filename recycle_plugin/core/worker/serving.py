"""A source's side of catching up: it hands the state of its stage out to newcomers, while it trains.

Nobody waits for a newcomer.  Units are read between two steps, and only while all that is applied here is known to be
committed, so that nothing is handed out that may be taken back; where the sum of the next step is there already, it
goes after the unit.  Sums go out as soon as they are made, markers once the commit is known; what the script changes
between two steps, once it is in the next one (core/vocabulary/state_stream.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Handed, Head, Item, Marker, Sums, Unit
from recycle_plugin.core.vocabulary.step_batches import LiveShare


class Applied(NamedTuple):
    """How a step was applied: with regard to which ``norm``, with which ``settings`` of the optimizer, and which part
    of the replicas had contributed.
    """

    norm: Any = None
    settings: Any = None
    share: LiveShare = LiveShare()


class SharedState(Protocol):
    """A worker's state of its stage, as others are given it."""

    def head(self) -> tuple[Any, Mapping[str, int]]:
        """What goes by value, and the weight of each unit in bytes, by name."""

    def read(self, name: str, rest: bool) -> Any:
        """A copy of a unit; None as long as some of it is still to be read, by the next calls.

        ``rest``: all that is left of it, however long that takes.  Nothing of it changes between the calls.
        """

    def sums(self, step: int, names: Iterable[str]) -> Mapping[str, Any]:
        """What ``step`` applies to each of these units."""

    def changed(self, names: Iterable[str]) -> Iterable[str]:
        """Those of these units that the script has changed since the last step."""

    def settings(self) -> Any:
        """What the optimizer applies its next step with."""


class Outlet(Protocol):
    """A line to one newcomer; nothing that is called here blocks."""

    def asked(self) -> Iterable[Asked]:
        """What the newcomer has asked for since this was called last."""

    def send(self, item: Item) -> None:
        """Sends one item, after all before it."""

    def has_room(self, waiting: bool) -> bool:
        """Whether something may be read for this newcomer now.  ``waiting``: this worker has nothing else to do."""

    @property
    def broken(self) -> bool:
        """Whether the newcomer is gone."""

    def close(self) -> None:
        """Ends it; what was sent still gets there."""


class Service:
    """The serving of one newcomer, over ``outlet``."""

    def __init__(self, state: SharedState, outlet: Outlet) -> None:
        self._state, self.outlet = state, outlet
        self._wanted: deque[str] = deque()
        self._wants_head = False
        self._handed: set[str] = set()
        self._at: int | None = None  # the last marker's step
        self._ended: int | None = None  # the step after which the state is what the next one finds, as was said
        self._reading: tuple[str, int] | None = None  # a unit that is half read, and of which step
        self._script: Handed | None = None
        self._wants_script = False

    def between(self, stepped: int, valid_from: int, summed: bool, waiting: bool, final: bool) -> bool:
        """Hands out what may be now, a unit or a part of one, where the state is that after the committed step
        ``stepped``; returns whether it has done something.

        ``valid_from``: of this worker's data; ``summed``: the sum of the next step is there; ``waiting``: this worker
        has nothing else to do; ``final``: the script changes the state no more before the next step.
        """
        self._hear()
        if self._at is None:  # also where nothing is asked for: the newcomer goes on when all its sources have
            self._at = stepped
            self.outlet.send(Marker(stepped, begins=True, valid_from=valid_from))
        if final:
            self._end_changes(stepped, summed)
        if not (self._wants_head or self._wanted or self._reading):
            return False
        if self._wants_head:
            self._wants_head = False
            self.outlet.send(Head(stepped, *self._state.head()))
            return True
        if not self.outlet.has_room(waiting):
            return False
        return self._read(stepped, summed, rest=False)

    def _hear(self) -> None:
        for asked in self.outlet.asked():
            self._wants_head |= asked.head
            if asked.leave:
                self._wanted = deque(name for name in self._wanted if name not in asked.units)
            else:
                self._wanted.extend(asked.units)
            self._handed.difference_update(asked.units)
            if asked.script:
                self._wants_script = True
                if self._script is not None:  # it was damaged on its way
                    self.outlet.send(self._script)

    def hand_over(self, step: int, state: Callable[[], bytes]) -> None:
        """Sends what this worker's script hands over, if the newcomer has asked for that; ``step`` is its last one."""
        self._hear()
        if self._wants_script:
            self._script = Handed(step, state())
            self.outlet.send(self._script)

    def before_step(self, stepped: int) -> None:
        """Reads the rest of a unit of which some was read, since STEP changes it."""
        self._end_changes(stepped, True)
        if self._reading is not None:
            self._read(stepped, True, rest=True)

    def _end_changes(self, stepped: int, summed: bool) -> None:
        """Says once that the script changes the state after ``stepped`` no more, behind what it has changed of what was
        handed out.
        """
        if self._at != stepped or self._ended == stepped:
            return
        self._ended = stepped
        self.say_changes(stepped, summed)

    def say_changes(self, stepped: int, summed: bool = False) -> None:
        """Says which rates the script has set since ``stepped``, behind what it has changed of what was handed out."""
        if self._reading is not None:
            self._read(stepped, summed, rest=True)
        for name in self._state.changed(sorted(self._handed)):
            self.outlet.send(Unit(stepped, name, self._state.read(name, rest=True), again=True))
        self.outlet.send(Marker(stepped, ends=True, settings=self._state.settings()))

    def summed(self, step: int) -> None:
        """Sends what ``step`` applies to the units that were handed out: it is there now."""
        if self._handed:
            self.outlet.send(Sums(step, self._state.sums(step, sorted(self._handed))))

    def committed(self, step: int, applied: Mapping[int, Applied], valid_from: int) -> None:
        """Says that all up to ``step`` is committed.  ``applied``: how steps were."""
        while self._at is not None and self._at < step:
            self._at += 1
            how = applied.get(self._at, Applied())
            self.outlet.send(Marker(self._at, how.norm, valid_from=valid_from, settings=how.settings, share=how.share))

    def _read(self, stepped: int, summed: bool, rest: bool) -> bool:
        if self._reading is None:
            if not self._wanted:
                return False
            self._reading = self._wanted.popleft(), stepped
        name, step = self._reading
        assert step == stepped, f"{name} is read over a step"
        value = self._state.read(name, rest)
        if value is not None:
            self._reading = None
            self._handed.add(name)
            self.outlet.send(Unit(stepped, name, value))
            if summed:
                self.outlet.send(Sums(stepped + 1, self._state.sums(stepped + 1, [name])))
        return True


class Servings:
    """All newcomers that a worker serves."""

    def __init__(self) -> None:
        self._by_newcomer: dict[WorkerId, Service] = {}
        self._applied: dict[int, Applied] = {}  # the last steps

    def __bool__(self) -> bool:
        return bool(self._by_newcomer)

    def add(self, newcomer: WorkerId, serving: Service) -> None:
        """Serves one more, or one that has lost its line by another line."""
        self.end([newcomer])
        self._by_newcomer[newcomer] = serving

    def hand_over(self, newcomer: WorkerId, step: int, state: Callable[[], bytes]) -> None:
        """Hands over to a newcomer's script, where it is served here; as :meth:`Service.hand_over` does."""
        if newcomer in self._by_newcomer:
            self._by_newcomer[newcomer].hand_over(step, state)

    def say_changes(self, members: Collection[WorkerId], stepped: int) -> None:
        """Says to those who are ``members`` now what the script has changed since ``stepped``, before the next step's
        first forward.
        """
        for newcomer in self._by_newcomer.keys() & members:
            self._by_newcomer[newcomer].say_changes(stepped)

    def end(self, newcomers: Iterable[WorkerId]) -> None:
        """Serves these no more."""
        for newcomer in set(newcomers) & self._by_newcomer.keys():
            self._by_newcomer.pop(newcomer).outlet.close()

    def close(self) -> None:
        self.end([*self._by_newcomer])

    def between(self, stepped: int, committed: int, valid_from: int, summed: bool, waiting: bool, final: bool) -> bool:
        """Serves, where the state is that after step ``stepped``, and ``committed`` is known to be committed; returns
        whether there was something to do.  The others: see :meth:`Service.between`.
        """
        self.end([newcomer for newcomer, serving in self._by_newcomer.items() if serving.outlet.broken])
        self._say_committed(min(stepped, committed), valid_from)
        if stepped > committed:
            return False
        servings = self._by_newcomer.values()
        return sum(serving.between(stepped, valid_from, summed, waiting, final) for serving in servings) > 0

    def before_step(self, stepped: int, valid_from: int) -> None:
        """Gets ready for STEP, where the state is that after the committed step ``stepped``."""
        self._say_committed(stepped, valid_from)
        for serving in self._by_newcomer.values():
            serving.before_step(stepped)

    def summed(self, step: int) -> None:
        """Sends on what ``step`` applies."""
        for serving in self._by_newcomer.values():
            serving.summed(step)

    def stepped(self, step: int, applied: Applied) -> None:
        """Notes how ``step`` was applied."""
        before = {step - 1: self._applied[step - 1]} if step - 1 in self._applied else {}
        self._applied = before | {step: applied}

    def _say_committed(self, step: int, valid_from: int) -> None:
        for serving in self._by_newcomer.values():
            serving.committed(step, self._applied, valid_from)
