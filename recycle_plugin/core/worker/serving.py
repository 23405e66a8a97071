"""A source's side of catching up: it sends the state of its stage to newcomers, while it trains.

Nobody waits for a newcomer. Units are read between two steps, and only while every applied step is known to be
committed, so that nothing sent may be taken back; if the sum of the next step is there already, it follows the unit.
Sums go out as soon as they are made, markers once the commit is known, and the script's changes between two steps once
it is in the next one (core/vocabulary/state_stream.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Handed, Head, Item, Marker, Sums, Unit
from recycle_plugin.core.vocabulary.step_batches import LiveShare


class Applied(NamedTuple):
    """How a step was applied: its ``norm``, the optimizer's ``settings``, the contributing part of the replicas."""

    norm: Any = None
    settings: Any = None
    share: LiveShare = LiveShare()


class SharedState(Protocol):
    """A worker's state of its stage, as it is sent to others."""

    def head(self) -> tuple[Any, Mapping[str, int]]:
        """Return the non-tensor state, and the weight of each unit in bytes, by name."""

    def read(self, name: str, rest: bool) -> Any:
        """Return a copy of a unit; None while some of it is left to be read by the next calls, between which it does
        not change. ``rest``: read all that is left, however long that takes.
        """

    def sums(self, step: int, names: Iterable[str]) -> Mapping[str, Any]:
        """Return the gradients that ``step`` applies to each of these units."""

    def changed(self, names: Iterable[str]) -> Iterable[str]:
        """Return those of these units that the script has changed since the last step."""

    def settings(self) -> Any:
        """Return the optimizer's settings for its next step (learning rates and the like)."""


class Outlet(Protocol):
    """A line to one newcomer; no call blocks."""

    def asked(self) -> Iterable[Asked]:
        """Return the newcomer's requests since the last call."""

    def send(self, item: Item) -> None:
        """Send one item, after all before it."""

    def has_room(self, waiting: bool) -> bool:
        """Return whether to read for this newcomer now. ``waiting``: this worker has nothing else to do."""

    @property
    def broken(self) -> bool:
        """Whether the newcomer is gone."""

    def close(self) -> None:
        """Close the line. Data already sent still arrives."""


class Service:
    """The serving of one newcomer, over ``outlet``."""

    def __init__(self, state: SharedState, outlet: Outlet) -> None:
        self._state, self.outlet = state, outlet
        self._wanted: deque[str] = deque()
        self._wants_head = False
        self._handed: set[str] = set()
        self._at: int | None = None  # the last marker's step
        self._ended: int | None = None  # the step whose ending marker was sent
        self._reading: tuple[str, int] | None = None  # a unit that is partly read, and its step
        self._script: Handed | None = None
        self._wants_script = False

    def between(self, stepped: int, valid_from: int, summed: bool, waiting: bool, final: bool) -> bool:
        """Send a unit or a part of one, if allowed, while the state is that after the committed step ``stepped``;
        return whether anything was done.

        ``valid_from``: of this worker's data; ``summed``: the sum of the next step is there; ``waiting``: this worker
        has nothing else to do; ``final``: the script no longer changes the state before the next step.
        """
        self._hear()
        if self._at is None:  # also if nothing is asked for: the newcomer goes on when all its sources have
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
        """Send the ``on_join`` value of this worker's script, if the newcomer has asked for it; ``step`` is its last
        past step.
        """
        self._hear()
        if self._wants_script:
            self._script = Handed(step, state())
            self.outlet.send(self._script)

    def before_step(self, stepped: int) -> None:
        """Read the rest of a partly read unit, since STEP changes it."""
        self._end_changes(stepped, True)
        if self._reading is not None:
            self._read(stepped, True, rest=True)

    def _end_changes(self, stepped: int, summed: bool) -> None:
        """Send the script's last changes of the state after ``stepped``, then, once, that no more follow."""
        if self._at != stepped or self._ended == stepped:
            return
        self._ended = stepped
        self.say_changes(stepped, summed)

    def say_changes(self, stepped: int, summed: bool = False) -> None:
        """Send the units handed out that the script has changed since ``stepped``, then its settings."""
        if self._reading is not None:
            self._read(stepped, summed, rest=True)
        for name in self._state.changed(sorted(self._handed)):
            self.outlet.send(Unit(stepped, name, self._state.read(name, rest=True), again=True))
        self.outlet.send(Marker(stepped, ends=True, settings=self._state.settings()))

    def summed(self, step: int) -> None:
        """Send the gradient sum of ``step`` for the units already sent, now that the sum exists."""
        if self._handed:
            self.outlet.send(Sums(step, self._state.sums(step, sorted(self._handed))))

    def committed(self, step: int, applied: Mapping[int, Applied], valid_from: int) -> None:
        """Send that all steps up to ``step`` are committed. ``applied``: how each was applied."""
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
        """Serve one more newcomer, or one by a new line after it lost its line."""
        self.end([newcomer])
        self._by_newcomer[newcomer] = serving

    def hand_over(self, newcomer: WorkerId, step: int, state: Callable[[], bytes]) -> None:
        """Hand over to a newcomer's script, if it is served here, as :meth:`Service.hand_over` does."""
        if newcomer in self._by_newcomer:
            self._by_newcomer[newcomer].hand_over(step, state)

    def say_changes(self, members: Collection[WorkerId], stepped: int) -> None:
        """Send newcomers among ``members`` the script's changes since ``stepped``, before the next step's forwards."""
        for newcomer in self._by_newcomer.keys() & members:
            self._by_newcomer[newcomer].say_changes(stepped)

    def end(self, newcomers: Iterable[WorkerId]) -> None:
        """Stop serving these newcomers."""
        for newcomer in set(newcomers) & self._by_newcomer.keys():
            self._by_newcomer.pop(newcomer).outlet.close()

    def close(self) -> None:
        self.end([*self._by_newcomer])

    def between(self, stepped: int, committed: int, valid_from: int, summed: bool, waiting: bool, final: bool) -> bool:
        """Serve while the state is that after ``stepped``, and ``committed`` is known to be committed; return whether
        there was something to do. The other arguments: see :meth:`Service.between`.
        """
        self.end([newcomer for newcomer, serving in self._by_newcomer.items() if serving.outlet.broken])
        self._say_committed(min(stepped, committed), valid_from)
        if stepped > committed:
            return False
        servings = self._by_newcomer.values()
        return sum(serving.between(stepped, valid_from, summed, waiting, final) for serving in servings) > 0

    def before_step(self, stepped: int, valid_from: int) -> None:
        """Prepare for STEP, while the state is that after the committed step ``stepped``."""
        self._say_committed(stepped, valid_from)
        for serving in self._by_newcomer.values():
            serving.before_step(stepped)

    def summed(self, step: int) -> None:
        """Send the gradient sum of ``step`` to all newcomers."""
        for serving in self._by_newcomer.values():
            serving.summed(step)

    def stepped(self, step: int, applied: Applied) -> None:
        """Record how ``step`` was applied."""
        before = {step - 1: self._applied[step - 1]} if step - 1 in self._applied else {}
        self._applied = before | {step: applied}

    def _say_committed(self, step: int, valid_from: int) -> None:
        for serving in self._by_newcomer.values():
            serving.committed(step, self._applied, valid_from)
