"""Stages that nobody holds: which way their loss goes, what is known of logs, and what a replay reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from recycle_plugin.core.coordinator.facts.joining import Phase
from recycle_plugin.core.coordinator.facts.logs import Logs
from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.messages.from_coordinator import Beside, End, Generation, Replay, Resume
from recycle_plugin.core.messages.from_workers import (
    CatchUp,
    Durable,
    Exited,
    LogBroken,
    Logged,
    Replaying,
    SurvivorReport,
    Terminate,
    Unreplayable,
)
from recycle_plugin.core.vocabulary.blocks import Blocks
from recycle_plugin.core.vocabulary.commit_rule import StepMachine
from recycle_plugin.core.vocabulary.dataflow import Datum, provides
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.iterator_draws import Place
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.replay import StageReplay
from recycle_plugin.core.worker.shared_replay import Helpers
from recycle_plugin.core.worker.stage_work import CantReplay
from recycle_plugin.core.worker.step_log import CommittedStep, StepLog
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.lab.simulator import campaign
from recycle_plugin.lab.simulator.scenario import MILLISECOND, Trouble
from tests.support.membership import agree, holds, member, said, started
from tests.support.replaying import BACK, LEFT, Kept, come, decisions, has_replayed, having_lost, logging, lose

LIMIT_S = 100.0  # of tests/support/membership: wait_timeout_s


# --- which way a loss goes ----------------------------------------------------------------------------


def test_a_stage_that_nobody_holds_is_replayed_and_the_others_wait():
    membership = logging()
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details.items() >= {"way": "replay", "stages": [1], "steps": 1, "checkpoint": 1}.items()
    assert membership.ended is None and "replayed from the logs, 1 step;" in decision.text
    (replay,) = said(come(membership), Replay)
    assert (replay.step, replay.path, replay.committed, replay.stages) == (1, "a folder", 2, (1,))
    out = has_replayed(membership)
    (generation,) = said(out, Generation)
    assert Seat(0, 1) in generation.roster.working
    assert [event.details["steps"] for event in out.events if event.kind == "replayed"] == [1]
    number = generation.number
    membership.receive(SurvivorReport(2, number, 2, "plan", holds(2), incarnation=1), 1.0)
    assert [each.committed for each in said(agree(membership, number, dict.fromkeys(LEFT, 2)), Resume)] == [2]


@pytest.mark.parametrize(
    ("given", "why"),
    (
        ({"durable": False}, "no checkpoint that a stage could be replayed from is durable yet"),
        ({"rejoin": "never"}, "recycle.rejoin is never, and no spare waits"),
    ),
)
def test_a_stage_that_can_t_be_replayed_ends_the_job_and_says_why(given, why):
    membership = logging(**given)
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details.items() >= {"way": "end", "stages": [1], "why": why}.items()
    assert membership.ended.failed and "stage 1 has no live worker left" in membership.ended.reason


def test_a_job_that_does_not_log_ends_for_that_reason_whatever_others_there_are():
    membership = logging(log=False, rejoin="never")
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details["why"] == "nothing is logged (recycle.log)" and membership.ended.failed


def test_a_spare_may_replay_where_nobody_is_started_again():
    membership = logging(rejoin="never")
    membership.state.vacancies.join(7, "elsewhere", True, (), False, 0.0, CoordinatorOutput())
    assert membership.state.vacancies.has_spares
    membership.receive(Exited(2, -9, 1.0), 1.0)  # it takes this seat
    assert not membership.state.vacancies.has_spares
    membership.state.vacancies.join(8, "elsewhere", True, (), False, 1.0, CoordinatorOutput())
    assert [each.details["way"] for each in decisions(lose(membership, 3))] == ["replay"]


def test_where_all_who_were_to_replay_have_died_in_a_row_the_job_ends_and_does_not_wait():
    membership = logging(rejoin=1)
    lose(membership, 2, 3)
    membership.receive(Exited(2, 1, 2.0, incarnation=1), 2.0)
    assert not decisions(membership.tick(2.5)) and membership.ended is None, "the next of rank 3 is on its way"
    out = membership.receive(Exited(3, 1, 3.0, incarnation=1), 3.0)
    assert [event.details["rank"] for event in out.events if event.kind == "not_restarted"] == [3]
    (decision,) = decisions(membership.tick(3.5))
    assert decision.details["way"] == "end" and "too many processes in a row died" in decision.text
    assert membership.ended.failed and "stage 1 has no live worker left" in membership.ended.reason


def test_a_spare_takes_the_place_of_those_that_have_died_in_a_row():
    membership = logging(rejoin=1)
    lose(membership, 2, 3)
    membership.receive(Exited(2, 1, 2.0, incarnation=1), 2.0)
    membership.state.vacancies.join(8, "elsewhere", True, (), False, 2.0, CoordinatorOutput())
    membership.receive(Exited(3, 1, 3.0, incarnation=1), 3.0)
    membership.tick(3.5)
    assert membership.ended is None


def test_where_nobody_is_left_there_is_nobody_to_wait():
    membership = logging()
    (decision,) = decisions(lose(membership, 2, 3, 0, 1))
    assert decision.details["way"] == "end" and decision.details["why"] == "no worker is left"


FULL = {"0": "the log of rank 0 lacks records of step 2: disk full"}


@pytest.mark.parametrize(("broken", "along"), ((2, FULL), (3, {})))
def test_a_log_that_has_broken_off_matters_up_to_the_last_committed_step(broken, along):
    membership = logging()
    membership.receive(LogBroken(0, broken, "disk full"), 0.0)
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details["way"] == "replay" and decision.details["along"] == along


def test_a_checkpoint_makes_up_for_a_log_that_had_broken_off():
    membership = logging()
    membership.receive(LogBroken(0, 2, "disk full"), 0.0)
    assert said(membership.receive(Durable(1, 2, "another"), 0.0), Durable)
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details["way"] == "replay" and decision.details["checkpoint"] == 2


def test_what_a_log_lacks_behind_the_checkpoint_matters_though_it_had_lacked_something_before():
    """It had broken off before step 1, gone on, and broken off once more before a checkpoint of step 1 was durable."""
    membership = logging(durable=False)
    for lacking in (1, 2):
        membership.receive(LogBroken(0, lacking, "disk full"), 0.0)
    membership.receive(Durable(1, 1, "another"), 0.0)
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details["way"] == "replay" and decision.details["along"] == FULL


def test_a_checkpoint_that_becomes_durable_while_stages_are_replayed_counts_afterwards():
    """All who replay begin at the same one, and need the logs from there on."""
    membership = having_lost(2, 3)
    assert not said(membership.receive(Durable(0, 2, "another"), 1.0), Durable)
    (replay,) = said(come(membership), Replay)
    assert replay.step == 1
    (message,) = said(has_replayed(membership), Durable)
    assert message.step == 2 and membership.state.logs.checkpoint.step == 2


def test_who_comes_to_replay_after_a_log_has_broken_off_is_accompanied():
    membership = having_lost(2, 3)
    membership.receive(LogBroken(0, 2, "disk full"), 1.0)
    replays = said(come(membership), Replay)
    assert [replay.stages for replay in replays] == [(0, 1), (0, 1)]  # of the one that comes, and of its companion


def test_who_replays_already_is_accompanied_once_it_misses_what_a_log_has_lost_since():
    membership = having_lost(2, 3)
    (replay,) = said(come(membership), Replay)
    membership.receive(LogBroken(0, 2, "disk full"), 1.0)
    out = membership.receive(Unreplayable(2, "act 0.0.0@2 is in no log", 0, incarnation=1), 2.0)
    assert membership.ended is None
    assert replay.stages == (1,) and [replay.stages for replay in said(out, Replay)] == [(0, 1), (0, 1)]


def test_who_catches_up_replays_where_its_last_source_dies_before_the_newcomer_has_heard_of_it():
    """No line of the newcomer's breaks then, so that it asks for nothing."""
    membership = having_lost(2)
    assert not said(come(membership), Replay)
    out = lose(membership, 3)
    assert [whom for whom, each in out.messages if isinstance(each, Replay)] == [BACK]
    assert not membership.receive(CatchUp(2, incarnation=1), 2.0).messages, "it is on its way"


def test_a_planned_end_leaves_nobody_waiting_for_a_stage_that_nobody_replays():
    membership = having_lost(2, 3)
    membership.receive(Terminate(0, "SIGTERM"), 1.0)
    (decision,) = decisions(membership.tick(1.1))
    assert decision.details["why"] == "the job is about to end" and membership.ended.failed


def test_a_planned_end_waits_for_who_replays_already():
    membership = having_lost(2, 3)
    come(membership)
    membership.receive(Terminate(0, "SIGTERM"), 1.0)
    assert not decisions(membership.tick(1.1)) and not membership.ended.failed
    assert said(has_replayed(membership), Generation)


def test_the_deadline_is_for_the_next_word_of_who_replays():
    membership = having_lost(2, 3)
    come(membership)
    membership.receive(Replaying(2, 2, incarnation=1), 1.0 + LIMIT_S)
    membership.tick(1.0 + 2 * LIMIT_S)
    assert membership.ended is None
    membership.tick(2.0 + 2 * LIMIT_S)
    assert f"nothing was heard for {LIMIT_S:.0f} s of the process that was to replay it" in membership.ended.reason


def test_who_can_t_replay_ends_the_job_with_its_reason():
    membership = having_lost(2, 3)
    come(membership)
    out = membership.receive(Unreplayable(2, "the record of step 2 is in no log", incarnation=1), 1.0)
    (decision,) = decisions(out)
    why = {"why": "the record of step 2 is in no log", "lacks": None}
    assert decision.details.items() >= ({"way": "end", "stages": [1]} | why).items()
    assert said(out, End)[0].failed


def test_the_second_newcomer_of_a_stage_waits_and_replays_where_the_first_has_gone():
    membership = having_lost(2, 3)
    assert said(come(membership), Replay)
    out = come(membership, WorkerId(3, 1))
    assert not said(out, Replay) and membership.state.joining.get(WorkerId(3, 1)).phase is Phase.WAITING
    assert [each.members for each in said(out, Beside)] == [(replace(member(3), incarnation=1),)]
    out = membership.receive(Exited(2, -9, 1.0, incarnation=1), 1.0)
    assert [whom for whom, each in out.messages if isinstance(each, Replay)] == [WorkerId(3, 1)]


LINE = {"replicas": 1, "stages": 4}


def test_an_end_that_read_a_plain_iterator_is_not_replayed():
    """Which of its batches belong to the step that is under way nobody else knows."""
    membership = logging()
    membership.state.places.known = lambda: {0: Place(1, 4)}
    (decision,) = decisions(lose(membership, 2, 3))
    assert decision.details["way"] == "end" and "plain iterators" in decision.details["why"]


@pytest.mark.parametrize("dies", [False, True])
def test_nobody_is_let_in_before_all_empty_stages_have_somebody_still(dies):
    membership = started(**LINE, log=True, rejoin="always")
    for rank in range(4):
        membership.identify(WorkerId(rank))
    membership.receive(Durable(0, 0, "a folder"), 0.0)
    (decision,) = decisions(lose(membership, 1, 2))
    assert decision.details["stages"] == [1, 2]
    first, second = WorkerId(1, 1), WorkerId(2, 1)
    (replay,) = said(come(membership, first, **LINE), Replay)
    assert replay.stages == (1, 2)
    assert not said(has_replayed(membership, first), Generation)
    if dies:
        membership.receive(Exited(1, -9, 1.0, incarnation=1), 1.0)
    come(membership, second, **LINE)
    generations = said(has_replayed(membership, second), Generation)
    if dies:
        assert not generations, "stage 1 is empty again"
    else:
        assert {first, second} < generations[0].roster.workers


# --- what is known of logs ----------------------------------------------------------------------------


def logs(durable: int = 0) -> Logs:
    """Of four workers, whose job has gone on behind ``durable``, the step of a checkpoint."""
    known = Logs(kept=True, stages=4)
    known.durable(Durable(0, durable, "a folder"))
    known.resume(durable, {}, [WorkerId(rank) for rank in range(4)])
    return known


def test_of_a_worker_that_was_lost_before_its_first_word_nothing_is_on_the_disk():
    known = logs()
    known.lost(member(0))
    assert "lacks records of step 1" in known.along(3, (1,))[0] and not known.along(0, (1,))


def test_what_a_checkpoint_has_is_not_missing_in_a_log():
    known = logs()
    known.heard(Logged(0, 2))
    known.durable(Durable(0, 5, "another"))
    known.lost(member(0))
    assert not known.along(5, (1,)) and "lacks records of step 6" in known.along(6, (1,))[0]


def test_only_neighbours_have_sent_what_a_replay_needs():
    known = logs()
    known.broken(LogBroken(0, 1, "disk full"), stage=3)
    assert not known.along(4, (0, 1)) and list(known.along(4, (2,))) == list(known.along(4, (1, 2))) == [3]
    assert not known.along(4, (2, 3)), "what they have sent to each other is made again"


def test_a_replay_logs_anew_what_its_stage_had_sent():
    known = logs()
    known.lost(member(2))  # of stage 1
    assert list(known.along(3, (0,))) == [1]
    known.replayed(replace(member(3), incarnation=1), 3)
    assert not known.along(3, (0,))


def test_a_replay_whose_log_has_broken_off_logs_nothing_anew():
    membership = having_lost(2, 3)
    come(membership)
    membership.receive(LogBroken(2, 2, "disk full", incarnation=1), 1.0)
    has_replayed(membership)
    assert "the log of rank 2 lacks records of step 2" in membership.state.logs.along(2, (0,))[1]


@pytest.mark.parametrize("held", ({}, {"0.0": {"reduced 0@3": "", "params": ""}}), ids=("made again", "summed"))
def test_what_was_lost_of_a_step_that_is_finished_by_lineage_is_made_again(held):
    known = logs()
    known.heard(Logged(0, 2))
    known.lost(member(0))
    known.resume(2, held, [WorkerId(rank) for rank in range(1, 4)])
    assert bool(known.along(3, (1,))) == bool(held)


# --- what a worker logs -------------------------------------------------------------------------------


def act(number: int, stage: int = 0) -> Datum:
    return Datum("act", stage, MicroBatch(0, 0), number)


def test_a_datum_is_kept_once_for_each_attempt_that_it_is_valid_in():
    kept = Kept()
    log = StepLog(kept, boundaries=[0])
    for valid_from in (0, 0, 3, 3):
        log.kept(act(1), "a value", valid_from)
    log.kept(act(1, stage=1), "behind a boundary that is not logged", 0)
    assert kept.calls == [("keep", act(1), "a value", 0), ("keep", act(1), "a value", 3)]


def test_nothing_is_kept_of_committed_steps():
    kept = Kept()
    log = StepLog(kept, boundaries=[0])
    log.begin(4)
    log.kept(act(4), "a value", 0)
    assert kept.calls == []


def test_the_record_of_a_step_says_from_which_generation_on_its_data_counts():
    kept = Kept()
    log = StepLog(kept, boundaries=[0])
    log.applied(1, None)
    log.rejected(1, 5)  # what was made of step 2 with the weights after step 1
    log.applied(2, 7.0)
    log.commit(2, 5)
    assert kept.calls == [
        ("mark", 1),
        ("void", 1, 5),
        ("mark", 2),
        ("commit", CommittedStep(1, None, 0, 5)),
        ("commit", CommittedStep(2, 7.0, 5, 5)),
    ]


def test_who_has_replayed_a_step_says_of_it_what_its_record_did():
    kept = Kept()
    log = StepLog(kept, boundaries=[0])
    log.applied(1, None)
    log.commit(1, 6, counts_from=4)
    assert kept.calls[-1] == ("commit", CommittedStep(1, None, 4, 6))


# --- a replay -----------------------------------------------------------------------------------------


class Machine:
    """A machine whose numbers are the instructions that have made them, and what others log is their name."""

    def __init__(self, missing: Datum | None = None) -> None:
        self.control_view, self.sent = ControlView(2, 1), []
        self.waited: list[tuple[str, bool]] = []
        self.kept, self._missing = Kept(), missing
        self.compared: list[str] = []
        self.wrong = ""
        self.at = 0  # the step that the script's settings are of
        self.forgotten: list[int] = []
        self.closed = 0

    def clock(self) -> float:
        return 0.0

    def words(self) -> list:
        return []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def wait_logged(self, what: str, ready: Callable[[], Any], made: bool) -> Iterator[Any]:
        yield from ()
        self.waited.append((what, made))
        if (value := ready()) is None:
            raise CantReplay(f"{what} is in no log")
        return value

    def restore(self, replay: Replay) -> Iterator[int]:
        yield from ()
        return 7

    def logs(self) -> Machine:
        return self

    def faults(self) -> str:
        return ""

    def close(self) -> None:
        self.closed += 1

    def record(self, number: int) -> CommittedStep:
        return CommittedStep(number, norm=2.0 if number == 2 else None, counts_from=0, valid_from=number)

    def damaged(self, datum: Datum) -> bool:
        return False

    def get(self, datum: Datum) -> str | None:
        return None if datum == self._missing else f"logged {datum}"

    def set_for(self, step: int) -> None:
        self.at = step

    def spend(self, instruction: Instruction) -> Iterator[Any]:
        yield from ()

    def compute(self, instruction: Instruction, have: StepStore, boundary_only: bool) -> Mapping[Datum, Any]:
        assert instruction.step == self.at, "it computes with what the script had set for another step"
        return dict.fromkeys(provides(instruction), str(instruction))

    def differs(self, made: str, sent: str) -> str:
        self.compared.append(sent)
        return self.wrong

    def forget_sums(self, after: int) -> None:
        self.forgotten.append(after)

    def add_up_alone(self, instruction: Instruction, have: StepStore) -> str:
        return f"sum of {len(have.of('wgrad', instruction.step))}"


def replayed(machine: Machine, **more: Any) -> tuple[StageReplay, StepStore]:
    """Stage 1 of 3, two micro-batches, from behind step 0 up to step 2."""
    store = StepStore(Seat(0, 1), 3, False)
    store.put(Datum("params", 1, None, 1), "restored")
    shape, log = Topology(1, 3, 2), StepLog(machine.kept, [0, 1])
    nobody = Helpers(machine, store, shape, Blocks(shape, 1), limit=0)
    replay = StageReplay(machine, store, StepMachine(0), shape, True, log, nobody)
    machine.took = played_through(replay.run(Replay(0, "a folder", 2, **({"stages": (1,)} | more))))
    return replay, store


def played_through(run: Iterator[Any]) -> Any:
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def test_a_replay_is_the_stage_s_own_work_on_what_the_others_have_logged():
    machine = Machine()
    replay, store = replayed(machine)
    assert replay.clock == 2 and store[Datum("params", 1, None, 3)] == "1STEP@2"
    assert machine.waited == [
        (what, True)
        for number in (1, 2)
        for what in (
            f"the record of step {number}",
            *(
                f"{kind} of stage {stage}, micro-batch 0.{index}, step {number}"
                for index in (0, 1)
                for kind, stage in (("act", 0), ("grad", 2))
            ),
        )
    ]
    *_, said = machine.sent
    assert machine.sent[:2] == [Replaying(2, 1), Replaying(2, 2)] and machine.took == (7, 0)
    assert said.details["why"] == "recycle.log.helpers is 0"


def test_what_was_fetched_to_be_read_goes_once_the_replay_is_over():
    machine = Machine()
    replayed(machine)
    assert machine.closed == 1


def test_of_each_step_one_micro_batch_is_compared_with_what_had_been_sent():
    machine = Machine()
    replayed(machine)
    assert machine.compared == [
        f"logged {Datum(kind, 1, MicroBatch(0, number % 2), number)}" for number in (1, 2) for kind in ("act", "grad")
    ]
    machine.wrong = "it is twice that"
    with pytest.raises(
        CantReplay, match="^act of stage 1, micro-batch 0.1, step 1 differs from what was sent: it is tw"
    ):
        replayed(machine)


def test_what_a_replay_would_have_sent_is_logged_anew():
    machine = Machine()
    replayed(machine)
    kept = [(each[1].kind, each[1].step) for each in machine.kept.calls if each[0] == "keep"]
    assert kept == [(kind, number) for number in (1, 2) for _ in (0, 1) for kind in ("act", "grad")]
    commits = [record for name, record in ((each[0], each[-1]) for each in machine.kept.calls) if name == "commit"]
    assert [(each.step, each.norm) for each in commits] == [(1, None), (2, 2.0)]
    assert machine.kept.calls[-1] == ("flush",)


def test_what_another_stage_makes_meanwhile_may_take_its_time():
    machine = Machine()
    replayed(machine, stages=(1, 2))
    assert {made for what, made in machine.waited if "grad of stage 2" in what} == {False}
    assert {made for what, made in machine.waited if "grad of stage 2" not in what} == {True}


def test_a_replay_takes_over_from_which_generation_on_data_is_valid():
    assert replayed(Machine(), valid_from=9)[1].valid_from == 9
    assert replayed(Machine(), valid_from=1)[1].valid_from == 2, "that of the last step's record"


def test_what_is_in_no_log_is_named():
    with pytest.raises(CantReplay, match="^act of stage 0, micro-batch 0.1, step 2 is in no log$"):
        replayed(Machine(missing=Datum("act", 0, MicroBatch(0, 1), 2)))


# --- in virtual time ----------------------------------------------------------------------------------


def test_damage_ends_the_job_and_is_named():
    outcome = campaign.run("x", replace(campaign.REPLAY.job, log_damaged_share=1.0))
    assert not outcome.violations
    assert any(
        "recovery: stage 1 can't be replayed: the record of step 2 is in no log" in line for line in outcome.story
    )


def two_neighbours() -> Any:
    """Stage 1 is lost, and takes the last steps of its log with it; then stage 0, which is replayed by what the replay
    of stage 1 has logged.
    """
    troubles = (Trouble("kill", 500 * MILLISECOND, (Seat(0, 1),)), Trouble("kill", 2_500 * MILLISECOND, (Seat(0, 0),)))
    return replace(campaign.REPLAY.job, faults=(), steps=20, troubles=troubles, log_lag_us=300 * MILLISECOND)


def test_two_neighbours_are_lost_one_after_the_other_between_two_checkpoints(monkeypatch):
    outcome = campaign.run("x", two_neighbours())
    assert not outcome.violations and len([line for line in outcome.story if " replayed: " in line]) == 2
    monkeypatch.setattr(StageReplay, "_keep", lambda self, work, datum, value: None)
    without = campaign.run("x", two_neighbours())
    assert without.violations and any("with stage 1 (grad of stage 1" in line for line in without.story)


def test_a_disk_that_is_full_matters_until_the_next_checkpoint():
    given = replace(campaign.REPLAY.job, log_full=((2, "0.0"),))
    assert any("lacks records of step 2: its disk is full" in line for line in campaign.run("x", given).story)
    saved = campaign.run("x", replace(given, between=((1, "save"), (3, "save"))))
    assert not saved.violations and any(" replayed: " in line for line in saved.story)


def test_a_worker_that_is_killed_while_it_waits_for_a_replay_is_replayed_too():
    given = campaign.REPLAY.one("kill 0.2 at recovery.parked")
    assert given.faults[-1] == Fault("kill", Seat(0, 2), "at", "recovery.parked")
    outcome = campaign.run("x", given)
    assert not outcome.violations and any("stages 1, 2 are without a worker" in line for line in outcome.story)
