"""What a confused worker says: the coordinator and the others go on, whatever it is and whenever it comes.

Messages of all kinds, with any values of their types, at any moment of a job that the others play by the rules; what is
another's to say is refused before, as in the runtime.  The rule: core/coordinator/confused.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from random import Random
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from recycle_plugin.core.coordinator.confused import why_confused
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.output import CoordinatorOutput, SupervisorOf
from recycle_plugin.core.coordinator.speakers import OF_SUPERVISORS, Speakers
from recycle_plugin.core.coordinator.state_dump import dump
from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.from_coordinator import (
    Committed,
    End,
    Fence,
    Generation,
    HashAfter,
    LogOnly,
    Restart,
    Resume,
)
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    CatchUp,
    CaughtUp,
    ComputeTime,
    Contribution,
    Durable,
    Exited,
    Fatal,
    Heartbeat,
    Hello,
    Leaving,
    Left,
    LogFolder,
    Missing,
    OutOfData,
    Ready,
    Resized,
    StateHash,
    Stepped,
    SurvivorReport,
    Terminate,
    Through,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.of_worker import OfWorker
from recycle_plugin.core.messages.typed import names_of
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.control_view import ControlView
from tests.support.membership import agree, job, member, resumed, said, started, step

KINDS = [
    kind
    for kind in vars(from_workers).values()
    if isinstance(kind, type) and kind.__module__ == from_workers.__name__ and kind not in (Hello, LogFolder)
]
TEXTS = ("", "plan", "loss", "norm", "share", "0", "1", "0.0", "0.1", "9.9", "params 0@1", "wgrad 0@2", "a b", "saving")
NUMBERS = (-1, 0, 1, 2, 3, 7, 99, 10**9)
PLAIN = (None, 1, "x", [1, "x"], {"x": {}})


def wrong_word(kind: type, random: Random, near: Sequence[int] = ()) -> Any:
    """A message of ``kind`` whose fields are drawn, each from values of its type.  ``near``: numbers that come up more
    often than others.
    """
    numbers = (*NUMBERS, *near, *near)
    while True:
        try:
            return _made(kind, random, numbers)
        except ValueError:  # no such values go together
            continue


def _made(hint: Any, random: Random, numbers: Sequence[int]) -> Any:
    again = lambda of: _made(of, random, numbers)
    few = range(random.choice((0, 1, 1, 2)))
    if hint is JobSpec:
        return job(micro_batches=random.choice((0, 1, 2)), replicas=random.choice((0, 1, 2, 99)))
    if get_origin(hint) in (Union, UnionType):
        return again(random.choice(get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return tuple(again(parts[0]) for _ in few) if parts[-1] is Ellipsis else tuple(map(again, parts))
    if get_origin(hint) is dict:
        return {random.choice(TEXTS): again(get_args(hint)[1]) for _ in few}
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        hints, usual = get_type_hints(hint), _defaults(hint)
        given = [name for name in names_of(hint) if name not in usual or random.random() < 0.5]
        return hint(**{name: again(hints[name]) for name in given})  # type: ignore[operator]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return random.choice(list(hint))
    values: dict[Any, Sequence[Any]] = {
        int: numbers,
        str: TEXTS,
        bool: (True, False),
        bytes: (b"", b"x" * 100),
        float: (-1.0, 0.0, 1.5),
        NoneType: (None,),
        Any: PLAIN,
    }
    return random.choice(values[hint])


def _defaults(kind: Any) -> set[str]:
    if not is_dataclass(kind):
        return set(kind._field_defaults)
    return {each.name for each in fields(kind) if (each.default, each.default_factory) != (MISSING, MISSING)}


RANK, OTHERS = 3, (0, 1, 2)  # the confused one, and those that are not
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"rejoin": "always"},
    {"rejoin": "always", "log": True},
    {"unit": "worker", "clipping": 1.0, "clip": "validate"},
)
BELIEVED = (Fatal, Left, Leaving, Terminate)  # they mean the job's end, or a planned leave
ENTRIES = 1500  # of all collections of the coordinator's together; a job of this size has 400 mostly


def is_believed(message: object, membership: Membership) -> bool:
    """Whether what ``message`` says only its worker can know, so that it may cost the others something."""
    of_a_tensor = isinstance(message, Missing) and message.source in ("0.0", "0.1") and message.generation >= 0
    through = isinstance(message, Through) and membership.course.job is not None and membership.course.job.log
    return isinstance(message, BELIEVED) or of_a_tensor or through


class OthersPlayByTheRules(RuleBasedStateMachine):
    """Four workers, 2 x 2: three train, report, die and come to barriers as they have to, and one says anything."""

    @initialize(more=st.sampled_from(JOBS))
    def begin(self, more: dict[str, Any]) -> None:
        self.membership = started(**more)
        self.now = 0.0
        self.machines = {rank: StepMachine(0) for rank in OTHERS}
        self.generation, self.pending = 0, None
        self.reported = -1
        self.asked: set[int] = set()  # steps of which hashes are wanted
        self.speakers = Speakers({rank: ("h", rank) for rank in range(4)})
        for rank in range(4):
            self.speakers.comes(rank)
        self.process = WorkerId(RANK)

    # --- what the coordinator says, and the others do ------------------------------------------------

    def give(self, message: object) -> CoordinatorOutput:
        out = self.membership.receive(message, self.now)
        self.hear(out)
        return out

    def hear(self, out: CoordinatorOutput) -> None:
        for whom, each in out.messages:
            assert not (isinstance(each, Fence) and each.rank in self.machines), each
            assert not (isinstance(each, End) and each.failed and whom != self.process), each
            if isinstance(each, Generation):
                self.pending = each
            elif isinstance(each, Resume):
                self.resume(each)
            elif isinstance(each, Committed):
                for machine in self.machines.values():
                    machine.commit(each.step)
            elif isinstance(each, HashAfter) and whom in {WorkerId(rank) for rank in self.machines}:
                self.asked.add(each.step)
            elif isinstance(each, Restart) and whom == SupervisorOf(RANK):
                self.speakers.starts(each.worker)
                self.process = each.worker
                self.hear(self.membership.greet(each.worker, "h"))
        self.report()

    def resume(self, message: Resume) -> None:
        self.generation, self.pending = message.generation, None
        for machine in self.machines.values():
            machine.resume(message.committed, undo=False)
        for rank, machine in self.machines.items():
            if machine.stepped > message.committed:
                self.give(Stepped(rank, self.generation, machine.stepped))

    def report(self) -> None:
        """All report for a generation, once, when they have come to it."""
        pending = self.pending
        if pending is None or pending.number == self.reported:
            return
        if pending.from_step and any(each.committed + 1 < pending.from_step for each in self.machines.values()):
            return
        self.reported = pending.number
        for rank, machine in sorted(self.machines.items()):
            if WorkerId(rank) in pending.roster.workers:
                self.give(SurvivorReport(rank, pending.number, machine.stepped, "plan"))

    @rule(rank=st.sampled_from(OTHERS))
    def trains(self, rank: int) -> None:
        """It applies its next step, if it may."""
        machine = self.machines.get(rank)
        if machine is None or not machine.may_apply(machine.stepped + 1):
            return
        if self.pending is not None and (not self.pending.from_step or machine.stepped + 1 >= self.pending.from_step):
            return
        machine.applied(machine.stepped + 1)
        self.give(ComputeTime(rank, machine.stepped, 10, 10))
        if machine.stepped in self.asked:
            self.give(StateHash(rank, machine.stepped, "a state"))
        self.give(Stepped(rank, self.generation, machine.stepped))

    @rule()
    def time_passes(self) -> None:
        """Heartbeats come of all, and a tick."""
        self.now += 0.5
        for rank in (*self.machines, RANK):
            self.give(Heartbeat(rank, 1, int(self.now * 2), "is in", "its script"))
        self.hear(self.membership.tick(self.now))

    @precondition(lambda self: len(self.machines) == len(OTHERS))
    @rule()
    def another_dies(self) -> None:
        """Seat 0.0 does, if the confused one does not leave its stage, or replicas, empty."""
        if RANK in self.membership.roster.ranks:
            del self.machines[0]
            self.give(Exited(0, -9, self.now))

    # --- what the confused one says -------------------------------------------------------------------

    @rule(random=st.randoms(use_true_random=False), kind=st.sampled_from(KINDS), supervisor=st.booleans())
    def says_anything(self, random: Random, kind: type, supervisor: bool) -> None:
        """A message of any kind, on its own connection or on that of its supervisor."""
        committed = self.membership.committed
        message = wrong_word(kind, random, (RANK, RANK, committed, committed + 1, committed + 2, self.generation))
        if hasattr(message, "worker") and kind is not Ready and random.random() < 0.8:
            message = replace(message, rank=RANK, incarnation=self.process.incarnation)
        if kind is SurvivorReport and random.random() < 0.5:
            message = replace(message, digest="plan")
        self.say(message, supervisor)

    @rule(word=st.sampled_from((CatchUp(RANK), CaughtUp(RANK, 1, 0, 0), Ready(member(RANK), 0, job()))))
    def says_what_newcomers_do(self, word: object) -> None:
        """As its next process says it when that comes back."""
        if isinstance(word, Ready):
            assert self.membership.course.job is not None
            self.say(Ready(replace(word.member, incarnation=self.process.incarnation), 0, self.membership.course.job))
        else:
            self.say(replace(word, incarnation=self.process.incarnation))  # type: ignore[type-var]

    def say(self, message: object, supervisor: bool = False) -> None:
        hello = Hello(RANK, "supervisor" if supervisor else "worker", RANK, "h", self.process.incarnation)
        heard = self.speakers.may_say(hello, None if supervisor else self.process, message)
        if heard and not is_believed(message, self.membership):
            self.give(message)

    # --- what holds ---------------------------------------------------------------------------------

    @invariant()
    def others_are_there(self) -> None:
        if not hasattr(self, "membership"):
            return
        assert {*self.machines} <= self.membership.roster.ranks
        assert self.membership.ended is None
        assert entries(dump(self.membership)) < ENTRIES

    def teardown(self) -> None:
        """Once the confused one is gone the others train on."""
        if not hasattr(self, "membership"):
            return
        if RANK in self.membership.roster.ranks and 0 not in self.machines:
            return  # it was the last one of its stage
        if RANK in self.membership.roster.ranks or self.membership.course.joining:
            self.give(Exited(RANK, -9, self.now, incarnation=self.process.incarnation))
        last = self.membership.committed + 2
        for _ in range(20):
            for rank in tuple(self.machines):
                self.trains(rank)
        assert self.membership.committed >= last


def entries(record: Any) -> int:
    """How many values a dumped state has."""
    if isinstance(record, dict):
        return sum(map(entries, record.values()))
    return sum(map(entries, record)) if isinstance(record, list) else 1


def test_whatever_a_confused_worker_says_costs_at_most_itself() -> None:
    run_state_machine_as_test(OthersPlayByTheRules, settings=settings(max_examples=50, stateful_step_count=40))


IMPOSSIBLE = (
    (Stepped(RANK, 0, 9), "it has applied step 9, and only step 0 is committed"),
    (Stepped(RANK, 5, 1), "it speaks of generation 5, and the newest is 0"),
    (BarrierReached(RANK, 5, "saving", {}), "it speaks of generation 5"),
    (OutOfData(RANK, 0, 9), "it has no data for step 9"),
    (Contribution(RANK, 9, "loss", {"0.0": 1.0}, 2), "it has a loss of step 9"),
    (Contribution(RANK, 1, "loss", {"0.7": 1.0}, 2), "its loss of step 1 is of 0.7, which it can't have"),
    (Contribution(RANK, 1, "loss", {"0.0": 1.0}, 1), "its loss of step 1 is one of 1, and there are 2"),
    (Contribution(RANK, 1, "norm", {"0": 1.0}, 2), "its norm of step 1 is of 0, which it can't have"),
    (Contribution(RANK, 1, "norm", {"1": 1.0}, 2, 1), "its norm of step 1 is of shard 1, and it is shard 0"),
    (Contribution(RANK, 1, "luck", {"1": 1.0}, 2), "it has a number of step 1 that is called 'luck'"),
    (Resized(RANK, 0, 0, 0, 0), "it plans for 0 micro-batches"),
    (Durable(RANK, 0, "a folder", boundaries=(7,)), "it is to log boundaries [7] of 2 stages"),
    (Through(RANK), "it waits until it may go, and nothing is logged"),
    (SurvivorReport(RANK, 0, 0, "plan", {"wgrad": "?"}), "nobody can read what it reports to hold"),
    (SurvivorReport(RANK, 0, 0, "plan", {"wgrad 5@1": "0.0"}), "it holds wgrad of stage 5"),
    (SurvivorReport(RANK, 0, 3, "plan"), "it has applied step 3"),
    (SurvivorReport(RANK, 0, 0, "another plan"), "it reports twice for generation 0, and not the same"),
)


@pytest.mark.parametrize(("word", "why"), IMPOSSIBLE, ids=lambda each: each if isinstance(each, str) else "")
def test_who_says_what_can_t_be_is_given_up_and_the_others_go_on(word: object, why: str) -> None:
    membership = started()
    out = membership.receive(word, 0.0)
    (lost,) = [event for event in out.events if event.kind == "lost"]
    assert lost.details["cause"] == "confused" and lost.details["rank"] == RANK and lost.details["how"].startswith(why)
    assert {fence.rank for fence in said(out, Fence)} == {RANK}
    assert resumed(agree(membership, 1, dict.fromkeys(OTHERS, 0))) == [(1, 0)]
    assert Committed(1) in step(membership, 1, 1, OTHERS)


def test_who_reports_fewer_steps_than_it_has_said_to_have_applied_is_given_up() -> None:
    membership = started()
    step(membership, 0, 1)
    membership.receive(Exited(0, -9, 0.0), 0.0)
    out = membership.receive(SurvivorReport(RANK, 1, 0, "plan"), 0.0)
    assert "it has applied 0 steps, and has said so of step 1" in said(out, Fence)[0].reason


def test_who_finishes_no_collective_goes_and_who_has_no_data_whatever_others_give() -> None:
    for word in (lambda turn: Missing(RANK, turn, f"sum {turn}", ""), lambda turn: OutOfData(RANK, turn, 1)):
        membership = started()
        for turn in range(20):
            if RANK not in membership.roster.ranks:
                break
            membership.receive(word(turn), 0.0)
            agree(membership, membership.generation, dict.fromkeys(sorted(membership.roster.ranks), 0))
        assert membership.roster.ranks == {*OTHERS} and membership.ended is None
        assert Committed(1) in step(membership, membership.generation, 1, OTHERS)


def test_who_is_a_member_and_asks_to_take_part_again_stays_one() -> None:
    membership = started()
    assert membership.receive(Ready(member(RANK), 0, job()), 0.0) == CoordinatorOutput()
    assert Committed(1) in step(membership, 0, 1)


def test_a_report_of_who_is_no_member_is_none() -> None:
    """It has not caught up, and would take all of them back to its own step."""
    membership, back = started(rejoin="always"), WorkerId(RANK, 1)
    step(membership, 0, 1)
    membership.receive(Exited(RANK, -9, 0.0), 0.0)
    membership.greet(back, "h")
    membership.receive(Ready(replace(member(RANK), incarnation=1), 0, job(rejoin="always")), 0.0)
    membership.receive(SurvivorReport(RANK, 1, 0, "its plan", incarnation=1), 0.0)
    assert resumed(agree(membership, 1, dict.fromkeys(OTHERS, 1))) == [(1, 1)]


def test_who_holds_a_seat_that_is_not_its_own_can_t_begin() -> None:
    for wrong, why in (
        (replace(member(1), seat=Seat(0, 0)), "two members of one generation have the seat and shard"),
        (replace(member(1), seat=Seat(0, 9)), "seat 0.9 is none of the job"),
    ):
        membership = Membership(4)
        for rank in range(4):
            out = membership.receive(Ready(wrong if rank == 1 else member(rank), 0, job()), 0.0)
        (end,) = said(out, End)
        assert end.failed and why in end.reason


def test_a_worker_does_not_hear_what_is_over_again() -> None:
    view = ControlView(0)
    first, second = (Generation(number, (member(0), member(1)), 0, "start", 0.0) for number in (0, 1))
    for message in (first, Resume(0, 0), second, first, Resume(0, 0)):
        view.take(message)
        if message is first and view.generation is None and view.pending is first:
            view.adopt(first)
    assert view.pending is second and view.resume_of(second) is None
    view.take(Committed(1))
    view.take(Committed(1))
    assert len(list(view.take_news())) == 1
    assert view.logged is None
    view.take(LogOnly((0,)))
    assert view.logged == {0}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("more", ({}, {"log": True, "rejoin": "always"}), ids=("plain", "log"))
def test_no_number_of_words_fills_the_coordinators_memory(kind: type, more: dict[str, Any]) -> None:
    membership, random = started(**more), Random(kind.__name__)

    def kept_after(words: int) -> int:
        for _ in range(words):
            word = wrong_word(kind, random, range(-1000, 1000))
            if kind is Ready:
                word = replace(word, member=replace(word.member, rank=RANK, incarnation=0))
            elif isinstance(word, OfWorker):
                word = replace(word, rank=RANK, incarnation=0 if kind not in OF_SUPERVISORS else word.incarnation)
            may = not (is_believed(word, membership) or (kind is Exited and not word.incarnation))
            if may and not (isinstance(word, OfWorker) and why_confused(word, membership.course)):
                membership.receive(word, 0.0)
        return entries(dump(membership))

    few = kept_after(300)
    assert kept_after(600) - few < 40
