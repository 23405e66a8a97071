"""A replay that others help with: who is asked, what each makes, and what becomes of a helper that is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from recycle_plugin.core.messages.from_coordinator import Beside, Generation, LogsAt, Replay
from recycle_plugin.core.messages.from_workers import Note
from recycle_plugin.core.vocabulary.blocks import Block, Blocks
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import TRAVELS, Datum, provides
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member, Roster, WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.helper import CantHelp, Helper
from recycle_plugin.core.worker.replay import Replayed, StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.shares import Answer, Call, Lot, Share, Word
from recycle_plugin.core.worker.stage_work import CantReplay, PartTimes, StageWork
from recycle_plugin.core.worker.step_log import CommittedStep, StepLog
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.exercised import ProtocolRule
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Scenario, Trouble
from tests.support.replaying import Kept

SHAPE = Topology(2, 3, 4)  # the second stage is replayed, by rank 2
BACK = WorkerId(2, 1)
HELPERS = tuple(
    Member(rank, seat, f"at {rank}", "h") for rank, seat in ((0, Seat(0, 0)), (4, Seat(0, 2)), (5, Seat(1, 2)))
)


@dataclass
class Sent:
    """Weights: the step that they are before."""

    step: int
    nbytes: int = 100


class Work:
    """Makes instructions' names, and counts what it has summed; of logs it reads what is asked for."""

    def __init__(self) -> None:
        self.summed: list[str] = []
        self.closed = 0

    def logs(self) -> Work:
        return self

    def faults(self) -> str:
        return ""

    def close(self) -> None:
        self.closed += 1

    def record(self, number: int) -> CommittedStep:
        return CommittedStep(number, valid_from=number)

    def get(self, datum: Datum) -> str:
        return f"logged {datum}"

    def wait_logged(self, what: str, ready: Any, made: bool) -> Iterator[Any]:
        yield from ()
        return ready()

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        yield from ()

    def differs(self, made: str, sent: str) -> str:
        return ""

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        self.summed += [str(datum.micro_batch) for datum in provides(instruction) if datum.kind == "wgrad"]
        return dict.fromkeys(provides(instruction), str(instruction))


class Stage(Work):
    """A stage that a helper makes."""

    def __init__(self) -> None:
        super().__init__()
        self.store = StepStore(Seat(0, 1), 3)
        self.begun: list[tuple[int, int]] = []

    def begin(self, step: int, weights: Sent) -> None:
        self.begun.append((step, weights.step))
        self.summed = []
        self.store.rewind(step - 1, 0)

    def sums(self, step: int, blocks: Any) -> list[str]:
        return self.summed


class Live:
    """The machine of a live worker."""

    def __init__(self, member: Member, line: Line, refuses: str = "") -> None:
        self.control_view, self.line, self.refuses = ControlView(member.rank, member.incarnation), line, refuses
        self.heard: list[Word] = []
        self.stage = Stage()

    def words(self) -> list[Word]:
        found, self.heard = self.heard, []
        return found

    def tell(self, address: str, word: Word) -> None:
        self.line.to_replacement(word)

    def make_stage(self, call: Call) -> Iterator[Any]:
        yield from ()
        if self.refuses:
            raise CantHelp(self.refuses)
        return self.stage


class Line(Work):
    """The machine of the worker that replays, with all others at the end of its lines; each thing that is waited for
    lets them work, and a second pass.

    ``lost_at``: the step in whose lot a rank is lost, with what it had made; ``late``: ranks whose shares never come.
    """

    def __init__(self, lost_at: Mapping[int, int], late: tuple[int, ...], refuses: Mapping[int, str]) -> None:
        super().__init__()
        self.control_view, self.address, self.now = ControlView(2, 1), "at 2.1", 0.0
        self.control_view.newcomer = True
        self.sent: list[object] = []
        self.told: list[tuple[str, Word]] = []
        self.added: list[tuple[int, list[str]]] = []
        self.kept = Kept()
        self.heard: list[Word] = []
        self.lost_at, self.late, self.roster = lost_at, late, HELPERS
        blocks = Blocks(SHAPE, 1)
        self.live = {each.rank: Live(each, self, refuses.get(each.rank, "")) for each in HELPERS}
        self.helpers = {rank: Helper(each, SHAPE, blocks, True) for rank, each in self.live.items()}
        self.step = 1
        self.took: Replayed | None = None

    def play(self, run: Iterator[Any]) -> None:
        while self.took is None:
            try:
                next(run)
            except StopIteration as end:
                self.took = end.value

    def clock(self) -> float:
        return self.now

    def send(self, message: object) -> None:
        self.sent.append(message)

    def restore(self, replay: Replay) -> Iterator[int]:
        yield from ()
        return 7

    def why_alone(self) -> str:
        return ""

    def forget_sums(self, after: int) -> None:
        self.summed = []

    def set_for(self, step: int) -> None:
        self.set_to = step

    def weights(self) -> Sent:
        return Sent(self.step)

    def words(self) -> list[Word]:
        found, self.heard = self.heard, []
        return found

    def tell(self, address: str, word: Word) -> None:
        self.told.append((address, word))
        rank = int(address.removeprefix("at "))
        if isinstance(word, Lot) and self.lost_at.get(rank) == word.step:
            self.roster = tuple(each for each in self.roster if each.rank != rank)
            self.control_view.take(Generation(9, Roster(self.roster), 0, "a loss", at=0.0))
        elif not (isinstance(word, Lot) and rank in self.late):
            self.live[rank].heard.append(word)

    def to_replacement(self, word: Word) -> None:
        self.heard.append(word)

    def wait_share(self, what: str, until: float) -> Iterator[Any]:
        yield from ()
        self.now += 1.0
        for helper in self.helpers.values():
            helper.asked()
            for _ in helper.work(lambda stage: stage == 1):
                pass

    def add_share(self, step: int, sums: Any) -> None:
        self.added.append((step, sums))

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> str:
        self.step = instruction.step + 1
        return f"sum of {len(have.of('wgrad', instruction.step))}"


def replayed(
    lost_at: Mapping[int, int] | None = None,
    late: tuple[int, ...] = (),
    refuses: Mapping[int, str] | None = None,
    size: int = 1,
    limit: int | None = None,
    shape: Topology = SHAPE,
    **more: Any,
) -> Line:
    machine = Line(lost_at or {}, late, refuses or {})
    store, log = StepStore(Seat(0, 1), 3, bool(shape.tie(1))), StepLog(machine.kept, [0, 1])
    helpers = Helpers(machine, store, shape, Blocks(shape, size), limit)
    replay = StageReplay(machine, store, StepMachine(0), shape, True, log, helpers)
    machine.tied_of = lambda logged: logged
    machine.play(replay.run(Replay(0, "a folder", 2, **({"stages": (1,), "helpers": HELPERS} | more))))
    assert store.committed == 2
    return machine


def lots(machine: Line, step: int) -> dict[int, list[list[str]]]:
    found: dict[int, list[list[str]]] = {}
    for address, word in machine.told:
        if isinstance(word, Lot) and word.step == step:
            found.setdefault(int(address[3:]), []).append([f"{block.replica}.{block.number}" for block in word.blocks])
    return found


def note(machine: Line) -> Note:
    (found,) = [each for each in machine.sent if isinstance(each, Note)]
    return found


def test_blocks_are_dealt_in_turn_and_each_is_made_once():
    machine = replayed()
    assert lots(machine, 1) == {0: [["0.1", "1.1"]], 4: [["0.2", "1.2"]], 5: [["0.3", "1.3"]]}
    assert machine.summed == ["0.0", "1.0"] * 2
    assert machine.added == [(step, [f"0.{n}", f"1.{n}"]) for step in (1, 2) for n in (1, 2, 3)]
    assert machine.took == Replayed(bytes=7, helpers=3)


def test_each_step_comes_with_its_own_weights():
    machine = replayed()
    assert all(live.stage.begun == [(1, 1), (2, 2)] for live in machine.live.values())
    assert note(machine).details["parameters_bytes"] == 2 * 3 * 100


def test_helpers_are_told_where_logs_are_and_let_go_of_what_they_have_fetched():
    logs = (LogsAt("a token", ("tcp://a:1",), (2,)),)
    machine = replayed(logs=logs)
    assert {word.logs for _, word in machine.told if isinstance(word, Call)} == {logs}
    assert [each.stage.closed for each in machine.live.values()] == [0] * len(HELPERS)
    for helper in machine.helpers.values():
        helper.leave()
        helper.leave()
    assert [each.stage.closed for each in machine.live.values()] == [1] * len(HELPERS)


def test_what_helpers_make_is_logged_by_who_replays():
    kept = [each[1] for each in replayed().kept.calls if each[0] == "keep"]
    assert len(kept) == len(set(kept)) == 2 * 2 * len(SHAPE.batch) and {each.kind for each in kept} == TRAVELS


@pytest.mark.parametrize("lost_at, late", (({4: 1}, ()), ({4: 2}, ()), ({}, (4,)), ({0: 1, 4: 1, 5: 2}, ())))
def test_what_somebody_was_to_make_who_is_lost_or_late_is_dealt_again(lost_at, late):
    machine = replayed(lost_at, late)
    made = [one for _, each in machine.added for one in each] + machine.summed
    assert sorted(made) == sorted(2 * [str(one) for one in SHAPE.batch])
    assert note(machine).details["helpers"] == 3 - len(lost_at) - len(late)
    assert len(note(machine).details["left"]) == len(lost_at) + len(late)
    assert all("it was late" in each for each in note(machine).details["left"]) == bool(late)


def test_a_share_that_comes_after_its_blocks_were_dealt_again_is_of_no_use():
    machine = replayed(late=(4,))
    (lot,) = [word for address, word in machine.told if isinstance(word, Lot) and address == "at 4"]
    store = StepStore(Seat(0, 1), 3)
    again = Line({}, (), {})
    helpers = Helpers(again, store, SHAPE, Blocks(SHAPE, 1))
    again.heard = [Share(WorkerId(4), BACK, lot.number, ["0.2"], ())]
    helpers.call(Replay(0, "a folder", 1, (1,), helpers=HELPERS))
    for _ in helpers.gather():
        pass
    assert again.added == []


def test_who_can_t_help_says_why_and_the_others_do():
    machine = replayed(refuses={0: "too little memory"})
    assert set(lots(machine, 1)) == {4, 5} and note(machine).details["left"] == ["seat 0.0 (rank 0): too little memory"]


def test_an_error_in_a_helper_is_an_answer_and_its_blocks_are_made():
    machine = Line({}, (), {})

    def broken(instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        raise CantHelp("RuntimeError: out of memory")

    machine.live[4].stage.compute = broken  # type: ignore[method-assign]
    store, log = StepStore(Seat(0, 1), 3), StepLog(machine.kept, [0, 1])
    helpers = Helpers(machine, store, SHAPE, Blocks(SHAPE, 1))
    for _ in StageReplay(machine, store, StepMachine(0), SHAPE, True, log, helpers).run(
        Replay(0, "a folder", 2, (1,), helpers=HELPERS)
    ):
        pass
    assert set(lots(machine, 1)) >= {0, 4, 5} and set(lots(machine, 2)) == {0, 5}
    assert "out of memory" in note(machine).details["left"][0]


ALONE = {
    "one block": ({"size": 4, "shape": Topology(1, 3, 4)}, "one block"),
    "two stages": ({"stages": (1, 2)}, "2 stages are replayed at once"),
    "tied": ({"shape": Topology(2, 3, 4, ((1, 2),))}, "shares weights"),
    "nobody there": ({"helpers": ()}, "no other worker is there"),
}


@pytest.mark.parametrize("given, why", ALONE.values(), ids=ALONE)
def test_where_nobody_helps_it_is_said_why(given, why):
    machine = replayed(**given)
    assert not any(isinstance(word, (Call, Lot)) for _, word in machine.told)
    assert why in note(machine).details["why"] and machine.took == Replayed(7, helpers=0)


@pytest.mark.parametrize("limit, size, called", ((1, 1, 1), (None, 1, 3), (None, 2, 3), (None, 4, 1)))
def test_no_more_are_called_than_there_is_work_for(limit, size, called):
    """Two replicas of four micro-batches: eight, four or two blocks, of which one is made by who replays."""
    machine = replayed(limit=limit, size=size)
    assert sum(isinstance(word, Call) for _, word in machine.told) == called == note(machine).details["helpers"]


CALL = Call(BACK, "at 2.1", 1, 9)
OWN = Lot(BACK, 1, 1, (next(iter(Blocks(SHAPE, 1).members())),), Sent(1))


def helped(line: Line, *heard: Word, wanted: Callable[[int], bool] = lambda stage: True) -> None:
    """The first of the live hears that, and does what it is asked for."""
    line.live[0].heard = [*heard]
    assert line.helpers[0].asked()
    for _ in line.helpers[0].work(wanted):
        pass


def test_a_helper_heeds_only_the_one_that_has_called_it():
    line = Line({}, (), {})
    helped(line, CALL, Lot(WorkerId(3, 1), 1, 1, (), Sent(1)))
    assert line.live[0].stage.begun == [] and line.heard == [Answer(WorkerId(0), BACK)]
    line.helpers[0].leave()
    helped(line, Lot(BACK, 1, 1, (), Sent(1)))
    assert line.live[0].stage.begun == [], "the stage is let go of"


def test_a_lot_of_a_stage_that_somebody_has_again_is_left():
    line, wanted = Line({}, (), {}), iter((True, False))
    helped(line, CALL, OWN, wanted=lambda stage: next(wanted))
    assert line.heard == [Answer(WorkerId(0), BACK)]


def test_what_is_in_no_log_ends_the_help_and_not_the_helper():
    line = Line({}, (), {})

    def nowhere(what: str, ready: Any, made: bool) -> Iterator[Any]:
        yield from ()
        raise CantReplay(f"{what} is in no log")

    line.live[0].stage.wait_logged = nowhere  # type: ignore[method-assign]
    helped(line, CALL, OWN)
    assert "is in no log" in line.heard[-1].why


def test_a_lot_of_other_blocks_is_refused():
    """Those of steps with another number of micro-batches, as of somebody who has not heard of a change."""
    line = Line({}, (), {})
    helped(line, CALL, Lot(BACK, 1, 1, (Block(0, 9),), Sent(1)))
    assert line.heard[-1].why == "its steps are divided into other blocks" and line.live[0].stage.begun == []


SECOND = Member(3, Seat(1, 1), "at 3", "h", 1)  # another worker of the stage had this rank


def with_beside(come_at: int, gone_at: int = 99, limit: int | None = None) -> Line:
    """Steps 1 to 3 are replayed.  ``come_at``: the step while which a newcomer of the stage comes and waits;
    ``gone_at``: the one in whose lot it is lost, with what it had made.
    """
    machine = Line({}, (), {})
    machine.live[3] = Live(SECOND, machine)
    machine.helpers[3] = Helper(machine.live[3], SHAPE, Blocks(SHAPE, 1), True)
    tell, begin = machine.tell, machine.set_for

    def told(address: str, word: Word) -> None:
        if isinstance(word, Lot) and address == "at 3" and word.step == gone_at:
            machine.control_view.take(Beside(()))
            machine.told.append((address, word))
        else:
            tell(address, word)

    def begun(step: int) -> None:
        begin(step)
        if step == come_at:
            machine.control_view.take(Beside((SECOND,)))

    machine.tell, machine.set_for = told, begun
    store, log = StepStore(Seat(0, 1), 3), StepLog(machine.kept, [0, 1])
    helpers = Helpers(machine, store, SHAPE, Blocks(SHAPE, 1), limit)
    replay = Replay(0, "a folder", 3, (1,), helpers=HELPERS)
    machine.play(StageReplay(machine, store, StepMachine(0), SHAPE, True, log, helpers).run(replay))
    return machine


def test_who_comes_to_the_stage_meanwhile_helps_from_the_next_step_on():
    machine = with_beside(come_at=1)
    assert set(lots(machine, 1)) == {0, 4, 5} and set(lots(machine, 2)) == set(lots(machine, 3)) == {0, 3, 4, 5}
    made = [one for step, each in machine.added if step == 3 for one in each]
    assert sorted(made + machine.summed[-2:]) == sorted(map(str, SHAPE.batch))
    assert machine.took == Replayed(bytes=7, helpers=4)


def test_what_it_was_to_make_that_is_gone_is_dealt_again_and_counts_once():
    machine = with_beside(come_at=1, gone_at=3)
    made = [one for step, each in machine.added if step == 3 for one in each]
    assert len(made) == len(set(made)) and not [one for one in made if [one] in lots(machine, 3)[3]]
    assert any("seat 1.1 (rank 3): it was lost" in each for each in note(machine).details["left"])
    assert note(machine).details["helpers"] == 3


def test_it_is_not_asked_where_no_more_are_to_help():
    assert all(address != "at 3" for address, _ in with_beside(come_at=1, limit=3).told)


def test_in_virtual_time_the_second_newcomer_of_a_stage_helps_the_first():
    outcome = campaign.run("x", both_of_two())
    assert not outcome.violations and outcome.exercised[ProtocolRule.HELPED_BESIDE] > 4
    assert any("with the help of 5 others" in line for line in outcome.story), "four of them are of other stages"


def both_of_two() -> Scenario:
    """Both workers of stage 1 are lost; the second newcomer comes while the first one replays."""
    kills = (Trouble("kill", 1_200 * MILLISECOND, (Seat(0, 1),)), Trouble("kill", 1_220 * MILLISECOND, (Seat(1, 1),)))
    faultless = replace(campaign.REPLAY.job, faults=(), between=(), clip=0.0)
    return replace(faultless, shape=Topology(2, 3, 4), steps=24, troubles=kills)


def test_who_waits_has_its_own_turn_where_the_one_that_it_helps_is_lost():
    given = both_of_two()
    struck = replace(given, faults=(Fault("kill", Seat(0, 1), "before", "1F0.0@9", incarnation=1),))
    outcome = campaign.run("x", struck)
    assert not outcome.violations and outcome.exercised[ProtocolRule.HELPED_BESIDE]
    assert any(" replayed: seat 1.1 (rank 4)" in line for line in outcome.story)


def test_who_answers_late_helps_from_then_on():
    machine = Line({}, (), {})
    store = StepStore(Seat(0, 1), 3)
    helpers = Helpers(machine, store, SHAPE, Blocks(SHAPE, 1))
    hears, machine.wait_share = machine.wait_share, lambda what, until: iter(())  # they are busy elsewhere
    helpers.call(Replay(0, "a folder", 2, (1,), helpers=HELPERS))
    machine.now = 0.0
    times = iter((0.0, 1.0, 30.0, 30.0))
    machine.clock = lambda: next(times)  # type: ignore[method-assign]
    assert list(helpers.gather()) == []
    machine.clock, machine.wait_share = lambda: 30.0, hears  # type: ignore[method-assign]
    list(hears("their answers", 0.0))
    work = StageWork(machine, store, SHAPE, True, lambda *kept: None)
    store.rewind(0, 0)
    for step in (1, 2):
        list(helpers.run(work, step, PartTimes(lambda: 0.0)))
    assert lots(machine, 1) == {} and set(lots(machine, 2)) == {0, 4, 5}


# --- in virtual time ----------------------------------------------------------------------------------


def line_of(helpers: int | None) -> Scenario:
    """One replica of six stages, 15 micro-batches, 20 steps to replay."""
    costs = CostModel.uniform(6, 5_000, 5_000, 5_000, 0, 0, 2_000)
    kill = Fault.parse("kill 0.1 before 1F0.0@21")
    return Scenario(
        Topology(1, 6, 15), costs, Policy(), 24, faults=(kill,), rejoin="always", logs=True, helpers=helpers
    )


def seconds(given: Scenario) -> dict[str, float]:
    """Of the parts of its replay, and of all of it behind the load."""
    outcome = campaign.run("x", given)
    assert not outcome.violations
    (text,) = [line for line in outcome.story if " helpers: " in line]
    parts = dict(
        part.split(" ") for part in text.partition("sent (")[2].replace(" s)", "").replace(" s,", ",").split(", ")
    )
    return {name: float(value) for name, value in parts.items()}


@pytest.mark.parametrize("helpers", (1, 2, 4))
def test_a_replay_takes_as_long_as_its_largest_share(helpers):
    """Within 10%, beside making the stage and loading it."""
    found = seconds(line_of(helpers))
    bound = 20 * -(-15 // (helpers + 1)) * 0.015
    assert bound <= found["compute"] + found["wait"] + found["parameters"] < 1.1 * bound


def test_with_four_helpers_it_is_two_and_a_half_times_as_fast_as_with_one():
    def took(helpers: int) -> float:
        found = seconds(line_of(helpers))
        return found["compute"] + found["wait"]

    assert took(1) / took(4) >= 2.5


def test_exact_blocks_are_dealt_whole_and_have_their_bits():
    """Five blocks of three micro-batches: one is made by who replays."""
    given = replace(line_of(None), policy=Policy(block=3))
    outcome = campaign.run("x", given)
    assert not outcome.violations and outcome.exercised[ProtocolRule.SHARED] == 20 * 4
    alone = campaign.run("x", replace(given, helpers=0))
    assert not alone.violations and not alone.exercised.get(ProtocolRule.SHARED)


def test_all_kills_of_a_helper_around_its_instructions():
    """Every fourth; all of them with ``recycle campaign --every-replay``."""
    moments = [each for each in campaign.REPLAY.moments() if each.split()[1] != "0.1#1" and each.split()[3][0] == "1"]
    assert len(moments) == 24
    for moment in moments[::4]:
        outcome = campaign.REPLAY.run(moment)
        assert not outcome.violations, (moment, outcome.violations)
