"""What becomes of those who come back, and what a newcomer waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from recycle_plugin.core.coordinator.facts.failure_detector import UNEVEN_S
from recycle_plugin.core.coordinator.facts.joining import Joining, Phase
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import ELSEWHERE, WAITS, Activity
from recycle_plugin.core.messages.from_coordinator import (
    Collected,
    Committed,
    End,
    Fence,
    Generation,
    HashAfter,
    Recorded,
    Resume,
)
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    CatchUp,
    CaughtUp,
    Exited,
    Heartbeat,
    Left,
    Ready,
    Serving,
    StateHash,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.state_stream import Asked, Handed, Head, Item, Marker, Unit
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.newcomer import Newcomer
from tests.support.membership import agree, job, member, said, started, step
from tests.support.played import Played

STAYING, BACK = (0, 1, 3), WorkerId(2, 1)
ENOUGH_POLLS = 3  # until a wait is over its deadline


def following(**more: object) -> Membership:
    """2 x 2, whose rank 2 was lost, and follows; ``more``: of the job."""
    membership = started(rejoin="always", **more)
    for rank in range(4):
        membership.identify(WorkerId(rank))
    membership.receive(Exited(2, -9, 0.0), 0.0)
    agree(membership, 1, dict.fromkeys(STAYING, 0))
    membership.identify(BACK)
    membership.greet(BACK, "h")
    membership.receive(Ready(replace(member(2), incarnation=1), 0, job(rejoin="always", **more)), 0.0)
    membership.receive(CatchUp(2, incarnation=1), 0.0)
    step(membership, 1, 1, list(STAYING))
    step(membership, 1, 2, list(STAYING))
    return membership


def announced(**more: object) -> Membership:
    """All others have come to the fifth step, from which a generation holds that it is announced for."""
    membership = following(**more)
    out = membership.receive(CaughtUp(2, 2, 9, 0, incarnation=1), 0.0)
    (generation,) = said(out, Generation)
    assert generation.from_step == 5 and Seat(0, 1) in generation.roster.working
    assert {whom for whom, each in out.messages if each == HashAfter(3)} == {WorkerId(3), BACK}
    step(membership, 1, 3, list(STAYING))
    for rank, incarnation in (WorkerId(3), BACK):
        membership.receive(StateHash(rank, 3, "alike", incarnation=incarnation), 0.0)
    step(membership, 1, 4, list(STAYING))
    return membership


def load_checkpoint(membership: Membership, generation: int, members: Iterable[WorkerId], number: int) -> list[object]:
    found = []
    for sent in (
        lambda one: BarrierReached(one.rank, generation, Barrier(Meets.LOADED), {}, incarnation=one.incarnation),
        lambda one: SurvivorReport(
            one.rank, generation + 1, number, "plan", {}, loaded=True, incarnation=one.incarnation
        ),
    ):
        for one in members:
            found += membership.receive(sent(one), 0.0).messages
    return found


def test_who_follows_for_long_keeps_no_losses_of_steps_that_are_over():
    view = ControlView(2, 1)
    for number in range(1, 9):
        for message in (Collected(number, "loss", {"mean": 1.0}), Committed(number)):
            view.take(message)
        view.take(Recorded(number, (1.0,), 1, (), number))
    assert [view.loss(number) for number in (1, 7, 8)] == [None, None, 1.0]


def test_who_follows_a_state_that_is_no_more_ends():
    membership = following()
    told = load_checkpoint(membership, 1, [WorkerId(rank) for rank in STAYING], 9)
    (end,) = [message for whom, message in told if isinstance(message, End)]
    assert "a checkpoint was loaded" in end.reason and not end.failed
    assert not membership.state.joining and membership.ended is None


@pytest.mark.parametrize("how", ("dies", "asks again"))
def test_who_is_gone_before_it_has_entered_is_not_waited_for_any_more(how):
    membership = announced()
    assert not said(agree(membership, 2, dict.fromkeys(STAYING, 4)), Resume), "they wait for its report, for a while"
    out = membership.receive(Exited(2, -9, 0.0, incarnation=1) if how == "dies" else CatchUp(2, incarnation=1), 0.0)
    (generation,) = said(out, Generation)
    assert not generation.from_step and generation.roster.ranks == set(STAYING)
    assert said(agree(membership, 3, dict.fromkeys(STAYING, 4)), Resume) and membership.ended is None


@pytest.mark.parametrize("stepped", (3, 4))
def test_a_newcomer_has_applied_all_that_is_committed_or_is_no_member(stepped):
    membership = announced()
    agree(membership, 2, dict.fromkeys(STAYING, 4))
    out = membership.receive(SurvivorReport(2, 2, stepped, "plan", incarnation=1), 0.0)
    assert bool(said(out, Resume)) == (stepped == 4)
    why = "it has applied 3 steps, and 4 are committed"
    assert {fence.reason for fence in said(out, Fence)} == ({why} if stepped == 3 else set())


@pytest.mark.parametrize("caught_up", (True, False))
def test_whose_script_may_be_behind_the_last_step_ends_by_itself(caught_up):
    """It may be saving weights, as the others' scripts were."""
    membership = following()
    if caught_up:
        membership.receive(CaughtUp(2, 2, 9, 0, incarnation=1), 0.0)
    for rank in STAYING:
        out = membership.receive(Left(rank, 0, False, 2), 0.0)
    assert [worker for worker, one in out.messages if isinstance(one, End)] == [BACK]
    assert [each.rank for each in said(out, Fence)] == [2] * (not caught_up) and out.events[-1].kind == "finished"


# --- where scripts push ---------------------------------------------------------------------------------


def test_who_does_not_report_in_time_is_called_off_and_announced_again():
    played = Played(announced())
    agree(played.membership, 2, dict.fromkeys(STAYING, 4))
    generations: list[Generation] = []
    while not generations:
        assert played.now < 1100, "the others wait for good"
        played.membership.receive(SupervisorHeartbeat(2, False, 0.0, incarnation=1), played.now)
        for rank in STAYING:
            played.signs(rank)
        generations = said(played.tick(TICK_S), Generation)
    assert not generations[0].from_step and generations[0].roster.ranks == set(STAYING)
    out = agree(played.membership, 3, dict.fromkeys(STAYING, 4))
    (again,) = said(out, Generation)
    assert said(out, Resume) and again.from_step and BACK in again.roster.workers


@pytest.mark.parametrize("at, ends", ((WAITS, True), (ELSEWHERE, False)))
def test_scripts_that_push_may_end_in_a_step_that_nobody_waits_in(at, ends):
    played = Played(started(pushed=True)).first_step()
    played.membership.receive(Left(0, 0, False, 1), played.now)
    began = played.now
    while played.now < began + UNEVEN_S - TICK_S:
        played.membership.receive(Heartbeat(1, 1, 9, Activity(at, "the others"), 2), played.now)
        assert not said(played.tick(TICK_S), End)
    for _ in range(4):
        played.membership.receive(Heartbeat(1, 1, 9, Activity(at, "the others"), 2), played.now)
        played.tick(TICK_S)
    reason = played.membership.ended.reason if played.membership.ended is not None else ""
    assert ("ended after step 1, and that of seat 1.0 (rank 1) is in step 2" in reason) == ends, reason


# --- a newcomer's waits ---------------------------------------------------------------------------------


class Trickle:
    """A line from which a piece comes every other time that anybody looks."""

    broken = False

    def __init__(self, units: int) -> None:
        names = [str(number) for number in range(units)]
        self._looked = 0
        self._items: list[Item] = [Marker(4, begins=True), Head(4, None, dict.fromkeys(names, 1))]
        self._items += [Unit(4, name, 0.0) for name in names]

    def ask(self, asked: Asked) -> None:
        pass

    def come(self, items: Iterable[Item]) -> None:
        self._items += items

    def close(self) -> None:
        pass

    def items(self) -> Iterable[Item]:
        self._looked += 1
        return [self._items.pop(0)] if self._items and self._looked % 2 else []


class Filled:
    """A state that notes which units were written."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def begin(self, step: int, head: Any) -> None:
        pass

    def write(self, name: str, value: Any) -> None:
        self.written.append(name)


class HasCaughtUp(Exception):
    """It has said so."""


class Port:
    """A newcomer's, whose waits end after a few looks, as by a deadline."""

    def __init__(self) -> None:
        self.control_view = ControlView(2, 1)
        self.control_view.take(Recorded(1, (0.5,) * 4, 0, (), 4))
        self.control_view.take(Serving(3, BACK, "there"))

    def wait(self, what: str, ready: Callable[[], Any], interruptible: bool = True) -> Iterator[Any]:
        yield from ()
        for _ in range(ENOUGH_POLLS):
            if (value := ready()) is not None:
                return value
        raise TimeoutError(what)

    def send(self, message: object) -> None:
        if isinstance(message, CaughtUp):
            raise HasCaughtUp

    def clock(self) -> float:
        return 0.0


class Loop:
    """Of a worker that does not get so far as to run it."""

    seat = Seat(0, 1)

    def asked_to_help(self) -> None:
        """Nobody replays a stage."""

    def stop_helping(self) -> None:
        pass

    def pass_over(self, past: int) -> None:
        pass


def test_a_deadline_is_for_the_next_piece_of_a_state_and_not_for_all_of_it():
    filled, line = Filled(), Trickle(units=100 * ENOUGH_POLLS)
    newcomer = Newcomer(Port(), Loop(), filled, lambda serving: line)
    with pytest.raises(HasCaughtUp):
        list(newcomer.train(5))
    assert len(filled.written) == 100 * ENOUGH_POLLS


def test_a_line_from_which_nothing_comes_is_waited_for_until_the_deadline():
    line = Trickle(units=5)
    line.items = list
    with pytest.raises(TimeoutError, match="the state of stage 1 from its peers, for step 5"):
        list(Newcomer(Port(), Loop(), Filled(), lambda serving: line).train(5))


def test_whose_last_line_the_coordinator_ends_asks_again(monkeypatch):
    """Another source may live, whose line had broken before: the coordinator takes that one to serve it still."""
    said: list[object] = []
    monkeypatch.setattr(Port, "send", lambda self, message: said.append(message))
    port, line = Port(), Trickle(units=5)
    line.items = list
    newcomer = Newcomer(port, Loop(), Filled(), lambda serving: line)
    for expected in ([CatchUp(2)], [CatchUp(2), CatchUp(2, 2)]):
        with pytest.raises(TimeoutError):
            list(newcomer.train(5))
        assert said == expected
        port.control_view.take(Generation(1, (Member(1, Seat(0, 1), "1", "h"),), 0, "a loss", 0.0))


def test_an_answer_to_an_earlier_request_than_the_last_is_of_no_use(monkeypatch):
    """Its line is closed once the last request has come to the source. A newcomer that took it asked once more, and was
    an answer behind for ever.
    """
    monkeypatch.setattr(Port, "send", lambda self, message: None)
    port, line, opened = Port(), Trickle(units=5), []
    line.items = list
    newcomer = Newcomer(port, Loop(), Filled(), lambda serving: opened.append(serving) or line)
    newcomer.asked = 1
    for number in (1, 2, 3):
        port.control_view.take(Serving(3, BACK, "there", number=number))
    with pytest.raises(TimeoutError):
        list(newcomer.train(5))
    assert [serving.number for serving in opened] == [1, 1, 2, 3]
    newcomer.asked = 3
    for number in (2, 3):
        port.control_view.take(Serving(3, BACK, "there", number=number))
    with pytest.raises(TimeoutError):
        list(newcomer.train(5))
    assert [serving.number for serving in opened] == [1, 1, 2, 3, 3]


class Entering(Loop):
    """Of one that comes in at once; its peer's script hands over later."""

    def __init__(self, port: Port, line: Trickle) -> None:
        self._port, self._line = port, line

    def pass_over(self, past: int) -> None:
        pass

    def enter(self, generation: Generation) -> Iterator[Any]:
        self._port.control_view.generation = generation
        self._line.come([Handed(4, b"an average")])
        return iter(())


def test_the_first_of_its_stage_waits_for_what_a_peers_script_hands_over(monkeypatch):
    """It has heard of no membership but that which it comes into."""
    monkeypatch.setattr(Port, "send", lambda self, message: None)
    port, line = Port(), Trickle(units=1)
    members = Member(2, Seat(0, 1), "2", "h", 1), Member(3, Seat(1, 1), "3", "h")
    port.control_view.pending = Generation(1, members, 5, "a return", 0.0)
    newcomer = Newcomer(port, Entering(port, line), Filled(), lambda serving: line, wants_script=lambda: True)
    list(newcomer.train(5))
    assert newcomer.handed == b"an average"


class Source(Trickle):
    """A line over which all comes that is asked for, with that the state changes no more; where its worker ``has_left``
    only the state, and nothing after that.
    """

    def __init__(self, has_left: bool) -> None:
        self._items, self._has_left, self.asked = [], has_left, []

    def ask(self, asked: Asked) -> None:
        self.asked += asked.units
        if asked.head:
            self._items += [Marker(4, begins=True), Head(4, None, {"a": 1, "b": 1})]
        self._items += [Unit(4, name, 0.0) for name in asked.units]
        if asked.units:
            self._items += [Marker(4, begins=True)] + [Marker(4, ends=True)] * (not self._has_left)

    def items(self) -> list[Item]:
        came, self._items = self._items, []
        return came


def of_two(port: Port, loop: Loop) -> tuple[dict[WorkerId, Source], Newcomer]:
    lines = {WorkerId(1): Source(has_left=True), WorkerId(3): Source(has_left=False)}
    port.control_view.take(Serving(1, BACK, "there"))
    filled = Filled()
    filled.take_settings = lambda settings: None
    return lines, Newcomer(port, loop, filled, lambda serving: lines[serving.worker], from_top=False)


def test_a_source_that_has_left_while_the_state_comes_is_waited_for_no_more():
    port = Port()
    lines, newcomer = of_two(port, Loop())
    lines[WorkerId(1)].ask = lines[WorkerId(1)].asked.append  # nothing comes
    with pytest.raises(TimeoutError):
        list(newcomer.train(5))
    port.control_view.take(Generation(1, (Member(3, Seat(1, 1), "3", "h"),), 5, "a leave", 0.0))
    with pytest.raises(HasCaughtUp):
        list(newcomer.train(5))
    assert sorted(lines[WorkerId(3)].asked) == ["a", "b"]


def test_who_takes_part_waits_for_no_source_that_has_left_before(monkeypatch):
    monkeypatch.setattr(Port, "send", lambda self, message: None)
    port = Port()
    loop = Entering(port, Trickle(units=0))
    lines, newcomer = of_two(port, loop)
    members = Member(2, Seat(0, 1), "2", "h", 1), Member(3, Seat(1, 1), "3", "h")
    port.control_view.pending = Generation(1, members, 5, "a return", 0.0)
    list(newcomer.train(5))
    assert sorted(lines[WorkerId(3)].asked) == ["a", "b"] and lines[WorkerId(1)].asked


def test_a_report_for_a_generation_that_was_called_off_lets_nobody_into_the_next():
    """It comes when the newcomer is announced once more: it has stopped for a membership that is no more."""
    joining = Joining()
    newcomer = joining.add(Member(1, Seat(1, 0), "1.1", "host", 1))
    newcomer.phase = Phase.CAUGHT_UP
    for generation, from_step in ((5, 10), (7, 12)):
        roster = joining.planned(Roster((Member(0, Seat(0, 0), "0", "host"),)))
        joining.announced(generation, roster, from_step)
        if generation == 5:
            joining.called_off(roster)
    assert not joining.may_enter(newcomer, 5, roster) and joining.may_enter(newcomer, 7, roster)
    assert joining.reported(newcomer) == [newcomer] and newcomer.phase is Phase.ENTERED


@pytest.mark.parametrize("knew", (True, False))
def test_of_a_source_that_it_knew_to_be_gone_a_newcomer_is_asked_nothing_more(knew):
    """Its line may break, and the rest be asked from the other, before the coordinator hears of the loss."""
    joining, out = Joining(), CoordinatorOutput()
    one, other = (Member(rank, Seat(rank, 0), str(rank), "host") for rank in (0, 2))
    newcomer = joining.add(Member(1, Seat(1, 0), "1.1", "host", 1))
    joining.catch_up(newcomer, Roster((one, other)), out)
    newcomer.came |= {one.worker, other.worker}
    sources = (other.worker,) if knew else (one.worker, other.worker)
    joining.caught_up(newcomer, sources, Roster((one, other)), 3, out)
    assert not joining.see_sources(Roster((other,)))
    assert newcomer.phase is (Phase.CAUGHT_UP if knew else Phase.CATCHING_UP)
    assert (newcomer.comparison is not None) == knew
