"""The state of a simulated worker's stage, as newcomers get it and fill it: its weight, and moments that no other
number depends on, each a unit of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_plugin.core.messages.from_workers import Serving
from recycle_plugin.core.vocabulary.dataflow import Datum, of_layers
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Head, Item, Unit
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.numbers import MOMENTS

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.simulated_worker import SimulatedMachine

WEIGHT = "weight"
UNITS = {WEIGHT: 3, **{name: place + 1 for place, name in enumerate(MOMENTS)}}  # with the size of each
CATCH_UP = "catch-up"  # the name of a line


class KeptNumbers(NamedTuple):
    """All numbers of a stage."""

    weight: int
    moments: dict[str, int]


class SimulatedState:
    """The state of the worker on ``machine``."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._half: set[str] = set()  # units of which half is read, for any newcomer
        self._watched: tuple[int, dict[str, int]] = -1, {}  # (last step, moments before the script changed any)
        self.applies: Mapping[str, Any] | None = None  # what the followed step applies; None: everything

    # --- for others --------------------------------------------------------------------------------

    def head(self) -> tuple[Any, Mapping[str, int]]:
        """Return the seat's name, as the non-tensor state, and the units."""
        return str(self._machine.seat), UNITS

    def read(self, name: str, rest: bool) -> Any:
        """Return a unit's number at the second call, None at the first."""
        if not rest and name not in self._half:
            self._half.add(name)
            return None
        self._half.discard(name)
        return self._weight if name == WEIGHT else self._machine.numbers.moments[name]

    def sums(self, step: int, names: Iterable[str]) -> Mapping[str, Any]:
        """Return what ``step`` applies to each of these units."""
        gradient = self._machine.numbers.gradient(step, self._machine.store)
        return dict.fromkeys(names, gradient)

    def watch(self) -> None:
        """Watch what the script changes from now on."""
        self._watched = self._machine.steps.stepped, dict(self._machine.numbers.moments)

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return those of these units that the script has changed since the last step."""
        step, before = self._watched
        now = self._machine.numbers.moments if step == self._machine.steps.stepped else before
        return [name for name in names if now.get(name) != before.get(name)]

    def settings(self) -> int:
        """Return the learning rate."""
        return self._machine.numbers.rate

    def digest(self) -> str:
        """Return all numbers, in place of a hash."""
        numbers = self._machine.numbers
        return " ".join(map(str, (self._weight, *numbers.moments.values(), numbers.rate)))

    # --- for itself --------------------------------------------------------------------------------

    def kept(self) -> KeptNumbers:
        """Return a copy of the state."""
        return KeptNumbers(self._weight, dict(self._machine.numbers.moments))

    def restore(self, kept: KeptNumbers) -> None:
        """Put a copy back."""
        self._machine.store.put(self._params, kept.weight)
        self._machine.numbers.moments = dict(kept.moments)

    @property
    def _weight(self) -> int:
        return self._machine.store[self._params]

    @property
    def _params(self) -> Datum:
        return of_layers("params", self._machine.seat, self._machine.steps.stepped + 1)

    # --- from others -------------------------------------------------------------------------------

    def fill(self, head: Any) -> None:
        """Begin with numbers that are surely wrong."""
        self._machine.store.put(self._params, None)
        self._machine.numbers.moments = dict.fromkeys(MOMENTS, -1)

    def write(self, name: str, value: Any) -> None:
        """Write a unit's number."""
        if name == WEIGHT:
            self._machine.store.put(self._params, value)
        else:
            self._machine.numbers.moments[name] = value

    def take_settings(self, settings: int) -> None:
        """Set another worker's learning rate."""
        self._machine.numbers.rate = settings

    def gathered(self, step: int, sums: Mapping[str, Any]) -> Mapping[Datum, Any]:
        """Return what REDUCE and TIE of ``step`` would have left."""
        self.applies = sums
        gradient = next(iter(sums.values()), None)
        kinds = ("reduced", "tied") if self._machine.numbers.tie else ("reduced",)
        return {of_layers(kind, self._machine.seat, step): gradient for kind in kinds}

    def follow(self, step: int) -> dict[Datum, Any]:
        """Apply ``step`` to the units that are there."""
        assert self.applies is not None, "a step is followed"
        applies, self.applies = self.applies, None
        machine = self._machine
        before, norm = machine.store[self._params], machine.store.get(of_layers("norm", machine.seat, step))
        after = machine.numbers.stepped(before, applies[WEIGHT], norm) if WEIGHT in applies else None
        for name in applies.keys() - {WEIGHT}:
            machine.numbers.move(name, applies[name], norm)
        return {of_layers("params", machine.seat, step + 1): after}


class SimulatedLine:
    """The line from a source to a newcomer, with both ends: core.worker.serving.Outlet and catching_up.Inlet. What goes
    over it takes time, may be held up, and may be damaged; the line breaks with either process. What is sent before the
    newcomer has come waits for it, as on a real line.
    """

    def __init__(self, source: SimulatedMachine) -> None:
        self._source = source
        self._taker: SimulatedMachine | None = None
        self._cluster = source.cluster
        self._asked: deque[Asked] = deque()
        self._items: deque[Item] = deque()
        self._early: list[Item] = []  # what was sent before the newcomer came
        self.broken = False

    def connect(self, taker: SimulatedMachine) -> None:
        """Give the line its other end, and send that what has waited."""
        self._taker = taker
        for item in self._early:
            self._send(item)

    # --- the source's end --------------------------------------------------------------------------

    def asked(self) -> Iterable[Asked]:
        """Return what was asked for since the last call."""
        self._see()
        found, self._asked = self._asked, deque()
        return found

    def send(self, item: Item) -> None:
        """Send one item. Some units are damaged on the way; a damaged head breaks the line."""
        if isinstance(item, Head) and self._cluster.damages():
            self._cluster.exercised[ProtocolRule.LINE_BROKE] += 1
            self.close()
            return
        if isinstance(item, Unit) and self._cluster.damages():
            item = Unit(item.step, item.name, None)
            self._cluster.exercised[ProtocolRule.DAMAGED] += 1
        if self._taker is None:
            self._early.append(item)
        else:
            self._send(item)

    def _send(self, item: Item) -> None:
        self._over("there", lambda: self._items.append(item))

    def has_room(self, waiting: bool) -> bool:
        """Return whether a unit may be read: not always at once."""
        return waiting or self._cluster.random.random() < 0.7

    # --- the newcomer's end ------------------------------------------------------------------------

    def ask(self, asked: Asked) -> None:
        """Ask for units."""
        self._over("back", lambda: self._asked.append(asked))

    def items(self) -> Iterable[Item]:
        """Return what has come since the last call."""
        self._see()
        found, self._items = self._items, deque()
        return found

    def close(self) -> None:
        """End the line. What is under way still arrives, if there is a newcomer."""
        if self._taker is None:
            self.broken = True
            return
        self._over("there", self._break)
        self._over("back", self._break)

    def _break(self) -> None:
        self.broken = True
        self._wake()

    def _see(self) -> None:
        ends = [self._source, *([self._taker] if self._taker is not None else ())]
        self.broken |= not all(end.alive for end in ends)

    def _over(self, way: str, happen: Any) -> None:
        assert self._taker is not None, "it has two ends"
        line = CATCH_UP, way, self._source.rank, self._taker.rank
        self._cluster.travel(line, partial(self._arrive, happen))

    def _arrive(self, happen: Any) -> None:
        happen()
        self._wake()

    def _wake(self) -> None:
        for end in (self._source, self._taker):
            if end is not None:
                self._cluster.wake(end)


def opened(machine: SimulatedMachine, newcomer: WorkerId) -> tuple[SimulatedState, SimulatedLine, str]:
    """Return the state for ``newcomer``, a line to it, and the line's address."""
    pipe = SimulatedLine(machine)
    address = f"pipe {len(machine.cluster.pipes)}"
    machine.cluster.pipes[address] = pipe
    return machine.shared, pipe, address


def inlet(machine: SimulatedMachine, serving: Serving) -> SimulatedLine:
    """Return the newcomer's end of the line that ``serving`` names."""
    pipe = machine.cluster.pipes[serving.address]
    pipe.connect(machine)
    return pipe
