"""A newcomer's side of catching up: it takes the state of its stage from several sources at once, while they train, and
follows the steps that they commit.

Its state is that after the committed step ``clock``. Units arrive in streams (core/vocabulary/state_stream.py), from
the state after ``clock`` or a later one. It advances by a step once every source has sent the marker of the next one:
the optimizer's own step applies the received sums to the units that are here. Units not yet here arrive later, in a
later state. A unit is asked for again if it was damaged, if it is older than the clock, or if its source is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Handed, Head, Item, Marker, Sums, Unit
from recycle_plugin.core.worker.filled_stage import FilledStage


class Inlet(Protocol):
    """A line from one source; no call blocks."""

    def ask(self, asked: Asked) -> None:
        """Ask the source for units."""

    def items(self) -> Iterable[Item]:
        """Return the items that have arrived since the last call, in order."""

    @property
    def broken(self) -> bool:
        """Whether the source is gone and everything it sent is handed out."""

    def close(self) -> None:
        """Close the line."""


@dataclass
class _Stream:
    inlet: Inlet
    at: int | None = None  # the last marker
    items: deque[Item] = field(default_factory=deque)
    sums: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step
    markers: dict[int, Marker] = field(default_factory=dict)  # by step
    ends: dict[int, Marker] = field(default_factory=dict)  # those that end a step's changes, by step

    def fetch(self) -> bool:
        """Take the items that the connection has; return whether there were any."""
        self.items.extend(self.inlet.items())
        return bool(self.items)

    def has_passed(self, step: int) -> bool:
        return self.at is not None and self.at >= step

    def forget(self, step: int) -> None:
        """Drop the stream's data of the steps up to ``step``."""
        self.ends = {each: marker for each, marker in self.ends.items() if each >= step}
        self.markers = {each: marker for each, marker in self.markers.items() if each > step}
        self.sums = {each: sums for each, sums in self.sums.items() if each > step}


class CatchingUp:
    """The catching up of one newcomer, which fills ``state``. ``wants_script()``: its script wants a peer's state."""

    def __init__(self, state: FilledStage, wants_script: Callable[[], bool] = lambda: False) -> None:
        self._state, self._wants_script = state, wants_script
        self._handed: Handed | None = None
        self._streams: dict[WorkerId, _Stream] = {}
        self._lead: WorkerId | None = None  # the source asked for the head
        self._weights: Mapping[str, int] = {}
        self._from: dict[str, WorkerId] = {}  # the source asked for each unit
        self._here: set[str] = set()  # units of the state after ``clock``
        self.clock: int | None = None
        self.damaged = 0  # units that had to be read again
        self.taken = 0  # bytes of units received, repeated ones included
        self.followed = 0  # bytes of sums received
        self.renewed = 0  # how often something that was here had to be asked for anew

    @property
    def whole(self) -> bool:
        return self.clock is not None and len(self._here) == len(self._weights)

    @property
    def sources(self) -> Collection[WorkerId]:
        return self._streams.keys()

    @property
    def deserted(self) -> bool:
        """Whether no source is left."""
        return not self._streams

    @property
    def progress(self) -> float:
        """The share of the state that is here, by weight."""
        total = sum(self._weights.values())
        return sum(self._weights[name] for name in self._here) / total if total else float(self.whole)

    def add_source(self, source: WorkerId, inlet: Inlet) -> None:
        """Add a source, or replace the stream of a source whose connection was broken."""
        if source in self._streams:
            self._drop(source)
        self._streams[source] = _Stream(inlet)
        if self._wants_script():
            inlet.ask(Asked(script=True))
        if self.clock is not None:
            self._take_over()
            self._share_out()

    def handed(self, giver: WorkerId) -> bytes | None:
        """Return the ``on_join`` value of ``giver``'s script after the last step here. None while it may still come,
        b"" if it won't come. Nothing else that arrives is used any more.
        """
        stream = self._streams.get(giver)
        gone = stream is None or stream.inlet.broken
        for stream in self._streams.values():
            stream.items.extend(stream.inlet.items())
            for item in stream.items:
                self._handed = item if isinstance(item, Handed) else self._handed
        if self._handed is not None and self._handed.step == self.clock:
            return self._handed.value
        return b"" if gone else None

    def keep_only(self, workers: Collection[WorkerId]) -> None:
        """Drop sources that are not among ``workers``: the line to a host that is cut off may stand for long."""
        for source in self._streams.keys() - workers:
            self._drop(source)

    def hash_after(self, step: int) -> bool:
        """Have the state after ``step`` hashed. Return False while some of it or of its scripted changes is missing."""
        ends = self._ends()
        if not self.whole or not ends:
            return False
        self._state.hash_after(step, ends[0].settings)
        return True

    def _ends(self) -> list[Marker]:
        """Return the markers that end the scripts' changes of this state; empty until all sources have sent theirs."""
        step, streams = self.clock or 0, self._streams.values()
        if not all(step in each.ends or each.has_passed(step + 1) for each in streams):
            return []
        return [stream.ends[step] for stream in streams if step in stream.ends]

    def take_changes(self) -> bool | None:
        """Apply source scripts' changes since the last step; return True once done, None before, False if deserted."""
        self.pump(self.clock or 0)
        if ended := self._ends() if self.whole else []:
            self._state.take_settings(ended[0].settings)
            return True
        return False if self.deserted else None

    @property
    def passed(self) -> bool:
        """Whether all sources are at a later step, and give nothing more of the state after ``clock``."""
        step = (self.clock or 0) + 1
        return bool(self._streams) and all(stream.has_passed(step) for stream in self._streams.values())

    def close(self) -> None:
        """Close all lines."""
        for stream in self._streams.values():
            stream.inlet.close()
        self._streams.clear()

    def pump(self, until: int) -> bool:
        """Handle arrived items, and follow up to step ``until`` at most. Return whether anything has changed."""
        before = self.clock, len(self._here), len(self._streams), self.taken
        for source in [source for source, stream in self._streams.items() if not self._hear(source, stream)]:
            self._drop(source)
        if self.clock is None:
            self._ask_for_head()
        while (self.clock is None or self.clock < until) and self._advance():
            pass
        return before != (self.clock, len(self._here), len(self._streams), self.taken)

    # --- what comes --------------------------------------------------------------------------------

    def _hear(self, source: WorkerId, stream: _Stream) -> bool:
        """Handle the items of a source. Later states stay in the connection, whose buffer is bounded. Return whether
        the source is still connected.
        """
        while stream.items or stream.fetch():
            if not self._take(source, stream, stream.items[0]):
                return True
            stream.items.popleft()
        return not stream.inlet.broken

    def _take(self, source: WorkerId, stream: _Stream, item: Item) -> bool:
        """Handle one item; return False if it is of a state that this worker has not reached."""
        match item:
            case Marker():
                stream.at = item.step
                if item.ends:
                    stream.ends[item.step] = item
                elif not item.begins:
                    stream.markers[item.step] = item
            case Sums():
                self.followed += item.bytes
                stream.sums.setdefault(item.step, {}).update(item.values)
            case Head():
                if self.clock is None:
                    self._begin(item)
            case Unit():
                if self.clock is not None and item.step > self.clock:
                    return False
                self._take_unit(source, stream, item)  # if asked for before it began anew, nobody wants it
            case Handed():
                self._handed = item
        return True

    def _begin(self, head: Head) -> None:
        self.clock, self._weights = head.step, head.units
        self._state.begin(head.step, head.value)
        self._share_out()

    def _take_unit(self, source: WorkerId, stream: _Stream, unit: Unit) -> None:
        if self._from.get(unit.name) != source:
            return  # another source was asked meanwhile
        self.taken += self._weights[unit.name]
        if unit.value is None:
            self.damaged += 1
            del self._from[unit.name]
            self._here.discard(unit.name)
            self._share_out(but=source)
        elif unit.step < (self.clock or 0):
            stream.inlet.ask(Asked((unit.name,)))
        else:
            self._state.write(unit.name, unit.value)
            self._here.add(unit.name)

    # --- whom to ask -------------------------------------------------------------------------------

    def _ask_for_head(self) -> None:
        if self._lead is None and self._streams:
            self._lead = min(self._streams)
            self._streams[self._lead].inlet.ask(Asked(head=True))

    def _share_out(self, but: WorkerId | None = None) -> None:
        """Ask for all units that no source was asked for, each from the source with the least to send; from ``but``
        only if there is no other. Costs time in proportion to units times sources.
        """
        sources = sorted(self._streams.keys() - {but}) or sorted(self._streams)
        if not sources:
            return
        load = dict.fromkeys(sources, 0)
        asked: dict[WorkerId, list[str]] = {source: [] for source in sources}
        for name, source in self._from.items():
            if source in load and name not in self._here:
                load[source] += self._weights[name]
        for name in sorted(self._weights.keys() - self._from.keys(), key=lambda name: (-self._weights[name], name)):
            source = min(sources, key=lambda one: (load[one], one))
            load[source] += self._weights[name]
            self._from[name] = source
            asked[source].append(name)
        for source, names in asked.items():
            if names:
                self._streams[source].inlet.ask(Asked(tuple(names)))

    def _take_over(self) -> None:
        """Have sources leave out the units that they would send last, as many as a new source can send. Looks at all
        units.
        """
        for source, stream in self._streams.items():
            asked = [name for name, whom in self._from.items() if whom == source and name not in self._here]
            left = sum(self._weights[name] for name in asked) / len(self._streams)
            leave = []
            for name in sorted(asked, key=lambda name: (-self._weights[name], name), reverse=True):
                if left < self._weights[name]:
                    break
                left -= self._weights[name]
                leave.append(name)
                del self._from[name]
            if leave:
                stream.inlet.ask(Asked(tuple(leave), leave=True))

    def _drop(self, source: WorkerId) -> None:
        """Ask the other sources for all units of a lost source. This includes units already received: their later
        gradient sums would have come from it.
        """
        self._streams.pop(source).inlet.close()
        self._lead = None if self._lead == source else self._lead  # the head may never come either
        self.renewed += 1
        for name in [name for name, whom in self._from.items() if whom == source]:
            del self._from[name]
            self._here.discard(name)
        if self.clock is not None:
            self._share_out()

    # --- following ---------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Advance by one step if all sources have passed it; return whether it did."""
        if self.clock is None or not self.passed:
            return False
        step = self.clock + 1
        told = [stream.markers[step] for stream in self._streams.values() if step in stream.markers]
        if not told:
            self._begin_anew()
            return False
        sums: dict[str, Any] = {}
        for source, stream in self._streams.items():
            found = stream.sums.get(step, {})
            sums.update({name: value for name, value in found.items() if self._follows(name, source)})
        self._state.follow(told[0], sums)
        self.clock = step
        self._ask_again(self._here - sums.keys())
        for source, stream in list(self._streams.items()):
            stream.forget(step)
            self._hear(source, stream)
        return True

    def _begin_anew(self) -> None:
        """Start over, because every source that was at the next step is gone."""
        self.clock, self._lead, self._weights = None, None, {}
        self.renewed += 1
        self._from.clear()
        self._here.clear()
        self._ask_for_head()

    def _follows(self, name: str, source: WorkerId) -> bool:
        return name in self._here and self._from[name] == source

    def _ask_again(self, names: Iterable[str]) -> None:
        """Ask once more for units that were here and got no sums."""
        for name in sorted(names):
            self.renewed += 1
            self._here.discard(name)
            self._streams[self._from[name]].inlet.ask(Asked((name,)))
