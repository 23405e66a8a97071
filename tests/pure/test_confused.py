"""What a confused worker says: the coordinator and the others go on, whatever it is and whenever it comes.

Messages of all kinds, with any values of their types, at any moment of a job that the others play by the rules; what is
another's to say is refused before, and what happens is shown and counted, as in the runtime.  The rule:
core/coordinator/words.py.
"""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from math import inf, nan
from random import Random
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, SupervisorOf
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.coordinator.state_dump import dump
from recycle_plugin.core.coordinator.words import Speakers, objection
from recycle_plugin.core.messages import from_workers
from recycle_plugin.core.messages.activity import ELSEWHERE, Activity
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import (
    Committed,
    End,
    Fence,
    Generation,
    HashAfter,
    LogOnly,
    Posted,
    Restart,
    Resume,
)
from recycle_plugin.core.messages.from_workers import (
    BarrierReached,
    CatchUp,
    CaughtUp,
    Contribution,
    Durable,
    Exited,
    Fatal,
    Heartbeat,
    Hello,
    HostGoes,
    Leaving,
    Left,
    LogFolder,
    Missing,
    Note,
    OutOfData,
    Post,
    ReadBoard,
    Ready,
    Resized,
    StateHash,
    Stepped,
    SurvivorReport,
    Terminate,
    Through,
    Vanishing,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.messages.said import SUPERVISOR, OfWorker
from recycle_plugin.core.messages.typed import names_of
from recycle_plugin.core.vocabulary.barrier import Barrier, Meets
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.observability.console import Announcer
from recycle_plugin.observability.metrics import Metrics
from tests.support.membership import agree, job, member, resumed, said, started, step

KINDS = [
    kind
    for kind in vars(from_workers).values()
    if isinstance(kind, type) and kind.__module__ == from_workers.__name__ and kind not in (Hello, LogFolder)
]
TEXTS = (
    *(
        "",
        "plan",
        "loss",
        "norm",
        "share",
        "0",
        "1",
        "0.0",
        "0.1",
        "9.9",
        "params 0@1",
        "wgrad 0@2",
        "0.0-1",
        "a b",
        "saving",
    ),
    *("start", "committed", "lost", "end", "fault", "written", "restored", "seat", "rank", "\ud800"),
)
NUMBERS = (-1, 0, 1, 2, 3, 7, 99, 10**9, 1 << 1000)
PLAIN = (None, 1, "x", [1, "x"], {"x": {}})


def wrong_word(kind: Any, random: Random, near: Sequence[int] = ()) -> Any:
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
        float: (-1.0, 0.0, 1.5, nan, inf),
        NoneType: (None,),
        Any: PLAIN,
    }
    return deepcopy(random.choice(values[hint]))


def _defaults(kind: Any) -> set[str]:
    if not is_dataclass(kind):
        return set(kind._field_defaults)
    return {each.name for each in fields(kind) if (each.default, each.default_factory) != (MISSING, MISSING)}


RANK, OTHERS = 3, (0, 1, 2)  # the confused one, and those that are not
JOBS: tuple[dict[str, Any], ...] = (
    {"rejoin": "always"},
    {"rejoin": "always", "log": True},
    {"unit": "worker", "clipping": 1.0, "clip": "validate"},
    {"rejoin": "always", "pushed": True},
    {"rejoin": "always", "unit": "replica", "policy": Policy(shrinks=True)},
    {},
)
BELIEVED = (Fatal, HostGoes, Left, Leaving, Terminate)  # they mean the job's end, or a planned leave
ENTRIES = 1500  # of all collections of the coordinator's together; a job of this size has 400 mostly
TURNS = 200  # of a job: some of the others', and more words of the confused one


def is_believed(message: object, membership: Membership) -> bool:
    """Whether what ``message`` says only its worker can know, so that it may cost the others something."""
    of_a_tensor = isinstance(message, Missing) and message.source in ("0.0", "0.1") and message.generation >= 0
    through = isinstance(message, Through) and membership.state.job is not None and membership.state.job.log
    return isinstance(message, BELIEVED) or of_a_tensor or through


class OthersPlayByTheRules:
    """Four workers, 2 x 2: three train, report, die and come to barriers as they have to, and one says anything.

    ``seed`` draws all of it.  In every second job the confused one says nothing for which it is given up.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(f"words of {seed}")
        self.careful = bool(seed % 2)
        self.now = 0.0
        self.console, self.metrics = Announcer(0), Metrics()
        self.membership, its = Membership(4), job(**JOBS[seed // 2 % len(JOBS)])
        self.mates = {1} if its.unit == "replica" else set()  # go with the confused one
        for rank in range(4):
            self.show(self.membership.receive(Ready(member(rank), 0, its), self.now))
        self.show(agree(self.membership, 0, dict.fromkeys(range(4), 0)))
        self.machines = {rank: StepMachine(0) for rank in OTHERS}
        self.generation: int = 0
        self.pending: Generation | None = None
        self.reported = -1
        self.asked: set[int] = set()  # steps of which hashes are wanted
        self.speakers = Speakers({rank: ("h", rank) for rank in range(4)})
        for rank in range(4):
            self.speakers.starts(WorkerId(rank))
        self.process = WorkerId(RANK)
        self.words = 0

    def play(self) -> int:
        """Plays it to its end; returns how many words were heard of the confused one."""
        turns = (*(self.says_anything,) * 5, self.says_what_newcomers_do, self.another_trains, self.another_trains)
        for _ in range(TURNS):
            self.random.choice(turns)()
            if self.random.random() < 0.1:
                self.time_passes()
            if self.random.random() < 0.01:
                self.another_dies()
            assert {*self.machines} <= self.membership.roster.ranks
            assert self.membership.ended is None
        assert entries(dump(self.membership)) < ENTRIES
        self.ends()
        return self.words

    # --- what the coordinator says, and the others do ------------------------------------------------

    def give(self, message: object) -> CoordinatorOutput:
        out = self.membership.receive(message, self.now)
        self.hear(out)
        return out

    def show(self, out: CoordinatorOutput) -> None:
        """What happens is shown as a real job's."""
        for event in out.events:
            self.metrics.take(event, self.now)
            if event.kind != "start":  # which opens the run folder
                self.console.say(event, self.now)

    def hear(self, out: CoordinatorOutput) -> None:
        self.show(out)
        for whom, each in out.messages:
            if isinstance(each, Fence) and each.rank in self.mates:
                self.machines.pop(each.rank, None)
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

    def trains(self, rank: int) -> None:
        machine = self.machines[rank]
        if not machine.may_apply(machine.stepped + 1):
            return
        if self.pending is not None and (not self.pending.from_step or machine.stepped + 1 >= self.pending.from_step):
            return
        machine.applied(machine.stepped + 1)
        if machine.stepped in self.asked:
            self.give(StateHash(rank, machine.stepped, "a state"))
        self.give(Stepped(rank, self.generation, machine.stepped, time=ComputeTime(10, 10)))

    def another_trains(self) -> None:
        self.trains(self.random.choice(sorted(self.machines)))

    def time_passes(self) -> None:
        self.now += 0.5
        for rank, machine in (*self.machines.items(), (RANK, StepMachine(0))):
            self.give(Heartbeat(rank, 1, int(self.now * 2), Activity(ELSEWHERE, "its script"), machine.stepped))
        self.hear(self.membership.tick(self.now))

    def another_dies(self) -> None:
        """Seat 0.0 does, if the confused one does not leave its stage, or replicas, empty."""
        if len(self.machines) == len(OTHERS) and not self.mates and RANK in self.membership.roster.ranks:
            del self.machines[0]
            self.give(Exited(0, -9, self.now))

    def ends(self) -> None:
        """Once the confused one is gone the others train on."""
        if RANK in self.membership.roster.ranks and 0 not in self.machines:
            return  # it was the last one of its stage
        if RANK in self.membership.roster.ranks or self.membership.state.joining:
            self.give(Exited(RANK, -9, self.now, incarnation=self.process.incarnation))
        last = self.membership.committed + 2
        for _ in range(20):
            for rank in tuple(self.machines):
                self.trains(rank)
            self.time_passes()
        assert self.membership.committed >= last

    # --- what the confused one says -------------------------------------------------------------------

    def says_anything(self) -> None:
        """A message of any kind, on its own connection or on that of its supervisor."""
        kind, committed = self.random.choice(KINDS), self.membership.committed
        near = (RANK, RANK, committed, committed + 1, committed + 2, self.generation)
        message = wrong_word(kind, self.random, near)
        if hasattr(message, "worker") and kind is not Ready and self.random.random() < 0.8:
            message = replace(message, rank=RANK, incarnation=self.process.incarnation)
        if kind is SurvivorReport and self.random.random() < 0.5:
            message = replace(message, digest="plan")
        self.say(message, supervisor=self.random.random() < (0.8 if kind.BY == SUPERVISOR else 0.2))

    def says_what_newcomers_do(self) -> None:
        """As its next process says it when that comes back."""
        job = self.membership.state.job
        assert job is not None
        incarnation = self.process.incarnation
        words = (
            CatchUp(RANK, incarnation=incarnation),
            CaughtUp(RANK, 1, 0, 0, incarnation=incarnation),
            Ready(replace(member(RANK), incarnation=incarnation), 0, job),
        )
        self.say(self.random.choice(words))

    def say(self, message: Any, supervisor: bool = False) -> None:
        hello = Hello(RANK, "supervisor" if supervisor else "worker", RANK, "h", self.process.incarnation)
        its_end = self.careful and isinstance(message, Exited) and message.worker == self.process
        if is_believed(message, self.membership) or its_end:
            return
        self.words += 1
        if not self.speakers.may_say(hello, None if supervisor else self.process, message):
            return
        if not (self.careful and isinstance(message, OfWorker) and objection(message, self.membership.state)):
            self.give(message)


def entries(record: Any) -> int:
    """How many values a dumped state has."""
    if isinstance(record, dict):
        return sum(map(entries, record.values()))
    return sum(map(entries, record)) if isinstance(record, list) else 1


def fuzzed(first: int, count: int) -> None:
    """Jobs of the seeds from ``first`` on, until so many words were said."""
    seeds = itertools.count(first)
    while count > 0:
        count -= OthersPlayByTheRules(next(seeds)).play()


def test_whatever_a_confused_worker_says_costs_at_most_itself() -> None:
    fuzzed(0, 3_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_100_000_words_of_confused_workers_cost_at_most_themselves() -> None:
    fuzzed(1_000, 100_000)


SAVING, EVALUATED = Barrier(Meets.SCRIPT, "saving"), Barrier(Meets.EVALUATED, number=1)
IMPOSSIBLE = (
    (Stepped(RANK, 0, 9), "its Stepped is of step 9, and only step 0 is committed"),
    (Stepped(RANK, 5, 1), "it names generation 5, and the newest is 0"),
    (BarrierReached(RANK, 5, SAVING, {}), "it names generation 5"),
    (
        BarrierReached(RANK, 0, EVALUATED, {"0.0": "1.0"}),
        "its message does not fit this job: BarrierReached(",
    ),
    (
        BarrierReached(RANK, 0, EVALUATED, {"0": 1.0}),
        "its message does not fit this job: BarrierReached(",
    ),
    (
        BarrierReached(RANK, 0, SAVING, {"one": "full"}),
        "its message does not fit this job: BarrierReached(",
    ),
    (
        BarrierReached(RANK, 0, SAVING, {str(RANK + 1): ""}),
        "its message does not fit this job: BarrierReached(",
    ),
    (BarrierReached(RANK, 0, Barrier(Meets.RESIZED), {}), "its message does not fit this job: BarrierReached("),
    (OutOfData(RANK, 0, 3), "its OutOfData is of step 3"),
    (Vanishing(RANK, 1), "its Vanishing is of step 1"),
    (Contribution(RANK, 3, "loss", {"0.0": 1.0}, 2), "its Contribution is of step 3"),
    (Contribution(RANK, 1, "loss", {"0.7": 1.0}, 2), "its message does not fit this job: Contribution("),
    (Contribution(RANK, 1, "loss", {"0.0": 1.0}, 1), "its message does not fit this job: Contribution("),
    (Contribution(RANK, 1, "norm", {"0": 1.0}, 2), "its message does not fit this job: Contribution("),
    (Contribution(RANK, 1, "norm", {"1": 1.0}, 2, 1), "its message does not fit this job: Contribution("),
    (Contribution(RANK, 1, "norm", {"1": (1.0, {"lm loss": (1.0, 2.0)})}, 2), "its message does not fit this job"),
    (Contribution(RANK, 1, "luck", {"1": 1.0}, 2), "its message does not fit this job: Contribution("),
    (Resized(RANK, 0, 0, 0, 0), "its message does not fit this job: Resized("),
    (Durable(RANK, 0, "a folder", boundaries=(7,)), "its message does not fit this job: Durable("),
    (Through(RANK), "its message does not fit this job: Through("),
    (SurvivorReport(RANK, 0, 0, "plan", {"wgrad": "?"}), "its report of what it holds can't be read"),
    (SurvivorReport(RANK, 0, 0, "plan", {"wgrad 0@1": "0.0:0,0.1:1"}), "its report of what it holds can't be read"),
    (
        SurvivorReport(RANK, 0, 0, "plan", {"wgrad 5@1": "0.0:0"}),
        "it reports data that no worker can have yet: SurvivorReport(",
    ),
    (SurvivorReport(RANK, 0, 3, "plan"), "it has applied 3 steps, and 0 are committed"),
    (SurvivorReport(RANK, 0, 0, "another plan"), "its two reports for generation 0 differ"),
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
    assert "it has applied 0 steps, and 1 are committed" in said(out, Fence)[0].reason


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


def unpackable(size: int) -> str:
    """A text that takes more than half of its length however it is sent."""
    return b64encode(Random(0).randbytes(size // 4 * 3)).decode()


@pytest.mark.parametrize(
    "word",
    (
        lambda size: Missing(RANK, 0, unpackable(size), "0.0"),
        lambda size: Fatal(RANK, "x" * size),
        lambda size: BarrierReached(RANK, 0, SAVING, {str(RANK): "x" * size}),
        lambda size: SurvivorReport(RANK, 1, 0, "plan", {f"{unpackable(size)} 0@1": ""}),
    ),
    ids=("complaint", "end", "barrier", "report"),
)
def test_the_longest_word_leaves_room_for_what_all_are_told_of_it(word: Callable[[int], OfWorker]) -> None:
    membership, told = started(), word(0)
    outs = [membership.receive(Exited(0, -9, 0.0), 0.0)] if isinstance(told, SurvivorReport) else []
    told = word(told.MOST - 200)
    with pytest.raises(ValueError, match="too long to be sent"):
        encode(word(told.MOST))
    outs.append(membership.receive(decode(encode(told)), 0.0))
    for rank in OTHERS:
        same = {"values": {}} if isinstance(told, BarrierReached) else {"held": {}}
        if isinstance(told, BarrierReached | SurvivorReport):
            outs.append(membership.receive(replace(told, rank=rank, **same), 0.0))
    assert sum(len(encode(message)) > told.MOST // 2 for out in outs for _, message in out.messages)


@pytest.mark.parametrize("kind", ("committed", "lost", "start", "fault", "of its own"))
def test_a_worker_notes_nothing_that_is_the_coordinators_to_say(kind: str) -> None:
    assert started().receive(Note(RANK, kind, "I say so", {"rank": 0}), 0.0) == CoordinatorOutput()
    (event,) = started().receive(Note(RANK, "warning", "I say so", {"rank": 0}), 0.0).events
    assert event.details["rank"] == RANK


def test_a_board_is_read_by_who_asks_for_a_rank_twice() -> None:
    membership = started()
    membership.receive(Post(RANK, 0, "a board", b"x"), 0.0)
    assert said(membership.receive(ReadBoard(RANK, 0, "a board", (RANK, RANK)), 0.0), Posted)


def test_a_loss_of_nothing_is_none() -> None:
    membership = started()
    membership.receive(Contribution(RANK, 1, "loss", {}, 2), 0.0)
    assert Committed(1) in step(membership, 0, 1)


def test_who_holds_a_seat_that_is_not_its_own_can_t_begin() -> None:
    for wrong, why in (
        (replace(member(1), seat=Seat(0, 0)), "two members of one generation have the seat and shard"),
        (replace(member(1), seat=Seat(0, 9)), "seat 0.9 is not in the job"),
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
def test_no_number_of_words_fills_the_coordinators_memory(kind: Any, more: dict[str, Any]) -> None:
    membership, random = started(**more), Random(kind.__name__)

    def kept_after(words: int) -> int:
        for _ in range(words):
            word = wrong_word(kind, random, range(-1000, 1000))
            if kind is Ready:
                word = replace(word, member=replace(word.member, rank=RANK, incarnation=0))
            elif isinstance(word, OfWorker):
                word = replace(word, rank=RANK, incarnation=0 if kind.BY != SUPERVISOR else word.incarnation)
            may = not (is_believed(word, membership) or (kind is Exited and not word.incarnation))
            if may and not (isinstance(word, OfWorker) and objection(word, membership.state)):
                membership.receive(word, 0.0)
        return entries(dump(membership))

    few = kept_after(300)
    assert kept_after(600) - few < 40
