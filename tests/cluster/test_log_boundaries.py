"""Jobs that log some boundaries only: what is in their logs, and what they say of it."""

from __future__ import annotations

import json

import pytest

from recycle_plugin.core.vocabulary.dataflow import TRAVELS
from recycle_plugin.runtime.log.segment import files, head
from tests.support.cluster import Result
from tests.support.jobs import BOTH, LOG, PLAIN, WRAPPED, Shape, faults
from tests.support.launching import Launch
from tests.support.logs import WholeReader

FOUR = Shape(1, 4, 4, layers=4)
ONE = pytest.mark.parametrize("vehicle", (PLAIN,), ids=("plain",), indirect=True)
EVERY = 6  # steps between checkpoints
# bytes over a boundary in a step, in plain torch: both ways, micro-batches, one's numbers
CROSSING = 2 * 4 * 32 * 16 * 4


def every(steps: int) -> dict[str, str]:
    wraps = [{"name": "checkpoint_every", "steps": steps, "concludes": True}]
    return {"script": WRAPPED, "RECYCLE_TEST_WRAP": json.dumps(wraps)}


def logs(result: Result) -> WholeReader:
    folder = result.folder / "log"
    (run_id,) = {head(path).stream.run_id for paths in files(folder).values() for path in paths.values()}
    return WholeReader(folder, run_id)


def in_logs(result: Result, after: int = 0) -> set[int]:
    """The boundaries over which something of the steps after ``after`` is in the logs of a job."""
    reader = logs(result)
    data = [datum for step in reader.committed if step > after for datum in reader.data(step) if datum.kind in TRAVELS]
    return {datum.stage - (datum.kind == "grad") for datum in data}


def bytes_of_a_step(result: Result) -> int:
    """The bytes of all tensors of the last step that are in the logs of a job."""
    reader = logs(result)
    return sum(len(raw) for datum in reader.data(reader.committed[-1]) for raw in reader.get(datum).tensors)


@BOTH
def test_what_a_list_names_is_logged_and_nothing_else(launch: Launch):
    result = launch(*LOG, "++recycle.log.boundaries=[1]", shape=FOUR, **every(EVERY)).ended_well()
    assert in_logs(result) == {1}
    unknown, known = result.of("log_boundaries")
    assert unknown["boundaries"] == known["boundaries"] == [1] and known["groups"] == [[0, 1], [2, 3]]
    assert "stages 0 to 1 and 2 to 3 replay together" in unknown["text"] and "not measured yet" in unknown["text"]
    assert known["log_bytes"] == EVERY * bytes_of_a_step(result) > 0 and known["every"] == EVERY and known["fits"]
    assert 0 < known["expected_s"] <= known["worst_s"] and not result.of("log_budget")


@ONE
def test_what_is_best_within_the_budget_is_chosen_once_steps_were_measured(launch: Launch):
    """One boundary and a half go into the budget."""
    budget = EVERY * CROSSING * 3 // 2
    more = ("++recycle.log.boundaries=auto", f"++recycle.log.budget={budget}", f"steps={4 * EVERY + 4}")
    result = launch(*LOG, *more, shape=FOUR, **every(EVERY)).ended_well()
    first, *others = result.of("log_boundaries")
    assert first["boundaries"] == [0, 1, 2] and "chooses once steps are measured" in first["text"]
    assert others and all(len(each["boundaries"]) == 1 and each["fits"] for each in others), others
    assert others[0]["log_bytes"] == EVERY * CROSSING and others[0]["budget"] == budget
    found = in_logs(result, after=4 * EVERY)
    assert found and found <= {boundary for each in others for boundary in each["boundaries"]} != {0, 1, 2}
    assert not result.of("log_budget"), "what was logged before the choice does not count"


@ONE
def test_a_log_that_takes_more_than_its_budget_is_said_to(launch: Launch):
    result = launch(*LOG, f"++recycle.log.budget={EVERY * CROSSING}", shape=FOUR, **every(EVERY)).ended_well()
    assert result.of("log_boundaries")[-1]["fits"] is False and in_logs(result) == {0, 1, 2}
    (said,) = result.of("log_budget")
    assert said["log_bytes"] == 3 * EVERY * CROSSING and 'recycle.log.boundaries to "auto"' in said["text"]


@ONE
def test_a_loss_beside_a_boundary_that_is_not_logged_is_named(launch: Launch):
    more, kill = ("++recycle.log.boundaries=[1]",), faults("kill 0.2 before 2F0.2@9")
    result = launch(*LOG, *more, kill, shape=FOUR, **every(EVERY)).finish()
    (said,) = result.of("recovery")
    assert result.code == 0 and said["way"] == "replay" and said["along"] == {"3": "the boundary 2|3 is not logged"}


@ONE
def test_a_boundary_that_there_is_not_is_refused_in_a_line(launch: Launch):
    result = launch(*LOG, "++recycle.log.boundaries=[3]", shape=FOUR).finish()
    assert result.code != 0 and "recycle.log.boundaries: there is no boundary 3: 4 stages have 0 to 2" in result.output
