"""A newcomer says how far it has come, every second, while its stage's state comes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from recycle_plugin.core.messages.from_workers import Note, Serving
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Head, Marker, Unit
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.newcomer import Newcomer

UNITS = dict.fromkeys("abcd", 1_000_000)


class Port:
    """Of the machine: the test lets time pass, between two looks."""

    def __init__(self) -> None:
        self.control_view = ControlView(3)
        self.now, self.said = 100.0, []

    def wait(self, what: str, ready: Any, interruptible: bool = True) -> Iterator[None]:
        while (found := ready()) is None:
            yield
        return found

    def send(self, message: object) -> None:
        self.said.append(message)

    def clock(self) -> float:
        return self.now


class Line:
    """From the only source; what the test puts there comes."""

    broken = False

    def __init__(self) -> None:
        self.coming: list = []

    def ask(self, asked: Asked) -> None:
        pass

    def items(self) -> list:
        found, self.coming = self.coming, []
        return found

    def close(self) -> None:
        pass


class State:
    def begin(self, step: int, head: object) -> None:
        pass

    def write(self, name: str, value: object) -> None:
        pass

    def follow(self, marker: Marker, sums: object) -> None:
        pass


def test_it_says_so_each_second_and_no_more_once_all_is_there():
    port, line = Port(), Line()
    loop = SimpleNamespace(seat=Seat(1, 1), asked_to_help=lambda: None, stop_helping=lambda: None)
    newcomer = Newcomer(port, loop, State(), lambda serving: line)
    port.control_view.take(Serving(1, WorkerId(3, 1), "here"))
    running = newcomer.train(1)

    def after(seconds: float, *items: object) -> list[Note]:
        port.now += seconds
        line.coming += items
        next(running)
        notes = [message for message in port.said if isinstance(message, Note)]
        port.said = [message for message in port.said if not isinstance(message, Note)]
        return notes

    assert after(0.0) == after(0.5, Marker(1, begins=True), Head(1, None, UNITS)) == []
    (note,) = after(0.5, Unit(1, "a", "A"))
    assert (note.rank, note.kind) == (3, "catching_up")
    assert note.details == {"seat": "1.1", "share": 0.25, "bytes": 1_000_000, "bytes_per_s": 1e6}
    assert note.text == "seat 1.1 (rank 3) has 25% of its stage's state, 1.0 MB have come, 1.0 MB/s"
    assert after(0.9, Unit(1, "b", "B")) == [], "not a second since"
    (note,) = after(1.1, Unit(1, "c", "C"))
    assert note.details == {"seat": "1.1", "share": 0.75, "bytes": 3_000_000, "bytes_per_s": 1e6}
    port.now += 5.0
    line.coming.append(Unit(1, "d", "D"))
    with pytest.raises(StopIteration) as through:
        next(running)
    assert through.value.value is True and not any(isinstance(message, Note) for message in port.said)
