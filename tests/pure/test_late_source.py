"""A source whose line stands late has its share of the state to give: the others leave it out."""

from __future__ import annotations

from types import SimpleNamespace

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Head, Marker, Unit
from recycle_plugin.core.worker.catching_up import CatchingUp
from recycle_plugin.core.worker.serving import Service

NAMES = tuple("abcdefghij")
ONE, OTHER = WorkerId(0, 0), WorkerId(1, 0)


class Line:
    """Both ends of a line: what was asked and sent, and what comes."""

    broken = False

    def __init__(self) -> None:
        self.said, self.sent, self.comes = [], [], []
        self.ask, self.send = self.said.append, self.sent.append
        self.has_room = lambda waiting: True
        self.close = lambda: None

    def items(self) -> list:
        came, self.comes = self.comes, []
        return came

    asked = items


def test_it_takes_over_what_others_would_give_last():
    written: list[str] = []
    state = SimpleNamespace(begin=lambda step, head: None, write=lambda name, value: written.append(name))
    catching_up, line, late = CatchingUp(state), Line(), Line()
    catching_up.add_source(ONE, line)
    catching_up.pump(9)
    line.comes = [Marker(5, begins=True), Head(5, b"", dict.fromkeys(NAMES, 10)), Unit(5, "a", "")]
    catching_up.pump(9)
    assert line.said == [Asked(head=True), Asked(NAMES)]
    catching_up.add_source(OTHER, late)
    assert line.said[2:] == [Asked(("j", "i", "h", "g"), leave=True)] and late.said == [Asked(("g", "h", "i", "j"))]
    line.comes = [Unit(5, name, "") for name in "bcdefg"]  # one was on its way
    late.comes = [Marker(5, begins=True), *(Unit(5, name, "") for name in "ghij")]
    catching_up.pump(9)
    assert catching_up.whole and sorted(written) == [*NAMES]


def test_what_is_left_to_another_one_is_not_read():
    line, state = Line(), SimpleNamespace(read=lambda name, rest: SimpleNamespace(name=name))
    serving = Service(state, line)
    line.comes = [Asked(("a", "b", "c"))]
    serving.between(5, 0, False, False, False)
    line.comes = [Asked(("b",), leave=True)]
    while serving.between(5, 0, False, False, False):
        pass
    assert [item.name for item in line.sent if isinstance(item, Unit)] == ["a", "c"]


def test_who_was_asked_for_the_head_is_asked_again_over_another_line():
    state = SimpleNamespace(begin=lambda step, head: None, write=lambda name, value: None)
    catching_up, line, another = CatchingUp(state), Line(), Line()
    catching_up.add_source(ONE, line)
    catching_up.pump(9)
    catching_up.add_source(ONE, another)
    catching_up.pump(9)
    assert line.said == another.said == [Asked(head=True)]


def test_what_was_asked_for_before_it_began_anew_does_not_stand_before_the_head():
    written: list[int] = []
    state = SimpleNamespace(begin=lambda step, head: None, write=lambda name, value: written.append(value))
    catching_up, line, late = CatchingUp(state), Line(), Line()
    catching_up.add_source(ONE, line)
    line.comes = [Marker(5, begins=True), Head(5, b"", {"a": 1})]
    catching_up.pump(9)
    line.broken = True
    catching_up.pump(9)
    catching_up.add_source(OTHER, late)
    late.comes = [Marker(6, begins=True), Unit(6, "a", 1)]
    catching_up.pump(9)
    assert late.said == [Asked(("a",)), Asked(head=True)] and catching_up.clock is None
    late.comes = [Head(6, b"", {"a": 1}), Unit(6, "a", 2)]
    catching_up.pump(9)
    assert catching_up.whole and catching_up.clock == 6 and written == [2]


def test_nobody_waits_for_a_source_that_has_left_and_whose_line_stands():
    settings: list[str] = []
    state = SimpleNamespace(
        begin=lambda step, head: None, write=lambda name, value: None, take_settings=settings.append
    )
    catching_up, line, left = CatchingUp(state), Line(), Line()
    catching_up.add_source(ONE, line)
    line.comes = [Marker(5, begins=True), Head(5, b"", {"a": 1}), Unit(5, "a", "")]
    catching_up.pump(9)
    catching_up.add_source(OTHER, left)
    line.comes, left.comes = [Marker(5, ends=True, settings="rates")], [Marker(5, begins=True)]
    assert catching_up.take_changes() is None and not settings
    catching_up.keep_only({ONE})
    assert catching_up.take_changes() is True and settings == ["rates"] and {*catching_up.sources} == {ONE}
