"""Workers are killed with SIGKILL at named instructions and at points of recovery; training goes on as if nothing
was.

Losses within 5e-6 of the run without a failure and ‖Δ‖/‖p‖ at most 1e-5 over 20 steps; the controls at the end show
that this would notice.  Of kills that are much alike some run, which --kill-seed chooses, on the plain adapter; with
DeepSpeed one of each kind.
"""

from __future__ import annotations

import json

import pytest

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.instruction import COMPUTE
from recycle_plugin.core.vocabulary.span import run_again
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import WRAPPED, Shape, assert_same_training, difference, faults
from tests.support.kills import (
    CLIPPED,
    CONTROLS,
    FIRST,
    FUSED,
    MOMENTS,
    SECOND,
    THREE,
    Kill,
    matrix,
    one_stage_ahead,
    replica_lost,
    struck,
)

pytestmark = pytest.mark.plain_too

# --- at named instructions, 2 x 2 -------------------------------------------------------------------


@pytest.mark.some_of(10)
@pytest.mark.parametrize("first, second", [pytest.param(*pair, id=f"{pair[0]}, {pair[1]}") for pair in matrix()])
def test_each_rank_at_named_instructions(launch, reference, first: Kill, second: Kill):
    result = launch(faults(first.at(FIRST), second.at(SECOND))).finish()
    assert_same_training(result, reference(), {first.seat, second.seat})
    assert struck(result) == {first.at(FIRST), second.at(SECOND)}


def test_the_matrix_has_every_seat_at_every_moment():
    kills = [kill for pair in matrix() for kill in pair]
    assert {kill.seat for kill in kills} == {"0.0", "0.1", "1.0", "1.1"}
    assert len(set(map(str, kills))) == 2 * sum(map(len, MOMENTS.values()))


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("seats", (("0.0", "1.1"), ("0.1", "1.0")))
@pytest.mark.parametrize(
    "setting, moments", ((CLIPPED, ("before VALIDATE", "after VALIDATE")), (FUSED, ("before B", "after B")))
)
def test_each_rank_at_what_only_some_jobs_run(launch, reference, seats, setting, moments):
    for first, second in (moments, moments[::-1]):
        kills = Kill(seats[0], first).at(FIRST), Kill(seats[1], second).at(SECOND)
        result = launch(faults(*kills), setting).finish()
        assert_same_training(result, reference(setting), set(seats))
        assert struck(result) == set(kills)


@pytest.mark.some_of(2)
@pytest.mark.parametrize("seat", ("0.0", "1.0", "0.1", "1.1"))
@pytest.mark.parametrize("after", (0, 1, 3))
def test_killed_within_an_instruction(launch, reference, tmp_path, seat, after):
    """In the middle of a sum of several buckets: its peer, which is at the same instruction, has parts of the sum then,
    and all that counts as it was before.
    """
    wrap = {"name": "die_within_sum", "seat": seat, "step": 6, "after": after, "folder": str(tmp_path / "found")}
    result = launch(script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(wrap)).finish()
    assert_same_training(result, reference(), {seat})
    replica, stage = seat.split(".")
    assert (tmp_path / "found" / f"{1 - int(replica)}.{stage}").read_text() == f"{after + 1} True"


# --- between two stages' steps, and during recovery -------------------------------------------------


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("ahead", (0, 1))
def test_a_stage_that_has_stepped_stays_so_where_nobody_needs_its_old_parameters(launch, reference, tmp_path, ahead):
    victim = f"0.{1 - ahead}"
    run = launch(
        faults(f"kill {victim} before {1 - ahead}REDUCE@7"), script=WRAPPED, **one_stage_ahead(tmp_path, ahead, 7)
    )
    result = run.finish()
    assert_same_training(result, reference(), {victim})
    assert [event["ahead"] for event in result.of("resume")] == [0, 1]
    assert result.of("recovery_plan") and not any(event["undone"] for event in result.of("recovery_plan"))


@pytest.mark.parametrize("ahead, undo", ((0, "snapshot"), (1, "host_snapshot"), (1, "inverse")))
def test_a_stage_that_has_stepped_takes_its_step_back(launch, reference, tmp_path, ahead, undo):
    """Also by the optimizer's rule, whose roundings are within what is tolerated."""
    kills = faults(*replica_lost(ahead))
    run = launch(kills, f"recycle.undo={undo}", shape=THREE, script=WRAPPED, **one_stage_ahead(tmp_path, ahead, 7, 3))
    result = run.finish()
    assert_same_training(result, reference(shape=THREE), {"0.0", "0.1"})
    assert {event["seat"] for event in result.of("recovery_plan") if event["undone"]} == {f"1.{ahead}", f"2.{ahead}"}


@pytest.mark.some_of(3)
@pytest.mark.parametrize("point", ("recovery.start:2", "recovery.report:2", "recovery.resume:2"))
@pytest.mark.parametrize("ahead", (0, 1))
def test_another_loss_while_recovering(launch, reference, tmp_path, point, ahead):
    """The first loss finds one stage ahead; then a worker of that stage dies at a named point of recovery."""
    victims = f"0.{1 - ahead}", f"1.{ahead}"
    kills = f"kill {victims[0]} before {1 - ahead}REDUCE@7", f"kill {victims[1]} at {point}"
    result = launch(faults(*kills), script=WRAPPED, **one_stage_ahead(tmp_path, ahead, 7)).finish()
    assert_same_training(result, reference(), set(victims))
    assert struck(result) == set(kills)


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("ahead", (0, 1))
def test_another_loss_when_a_step_has_just_been_taken_back(launch, reference, tmp_path, ahead):
    kills = *replica_lost(ahead), f"kill 1.{ahead} at recovery.undone"
    result = launch(faults(*kills), shape=THREE, script=WRAPPED, **one_stage_ahead(tmp_path, ahead, 7, 3)).finish()
    assert_same_training(result, reference(shape=THREE), {"0.0", "0.1", f"1.{ahead}"})
    assert struck(result) == set(kills)


@pytest.mark.plain_too(deepspeed=False)
def test_what_was_not_kept_is_run_again(launch, reference):
    """Nothing of what was sent stays: the lost worker's micro-batches start from their data, by whoever is left of
    their stages.
    """
    kill = "kill 0.1 before 1W0.1@6"
    result = launch(faults(kill), "recycle.keep_bytes=1", "recycle.trace=true").finish()
    assert_same_training(result, reference(), {"0.1"})
    assert struck(result) == {kill}
    survivors = [event for event in result.of("peak") if event["seat"] != "0.1"]  # which may be back at the end
    senders = {event["seat"]: event for event in survivors}
    assert senders.keys() == {"0.0", "1.0", "1.1"}
    assert all(
        event["dropped"] and event["kept_bytes"] and f"let {event['dropped']} of them go" in event["text"]
        for event in senders.values()
    ), senders
    kept = launch(faults(kill), "recycle.trace=true").finish()
    assert not any(event["dropped"] for event in kept.of("peak"))
    assert {"0F0.0@6", "0F0.1@6"} <= run_twice(result), "otherwise nothing had to be made again"
    assert all(instruction.startswith("1") for instruction in run_twice(kept)), "of the lost worker's stage alone"


def run_twice(result) -> set[str]:
    return {
        str(span.instruction)
        for span in run_again(read_traces(result.folder / "trace"))
        if span.instruction.op in COMPUTE
    }


# --- more replicas ----------------------------------------------------------------------------------

WIDE = Shape(replicas=4)


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("kill 1.0 before 0I1.0@5", "kill 3.0 after 0REDUCE@11"), id="one after the other, same stage"),
        pytest.param(("kill 0.0 after 0F0.1@5", "kill 2.1 before 1STEP@11"), id="one after the other"),
        pytest.param(("kill 0.1 before 1W0.0@6", "kill 2.1 before 1W2.0@6"), id="two at once, same stage"),
        pytest.param(("kill 3.0 before 0REDUCE@6", "kill 1.1 before 1REDUCE@6"), id="two at once"),
    ],
)
def test_two_of_eight(launch, reference, kills):
    result = launch(faults(*kills), shape=WIDE).finish()
    assert_same_training(result, reference(shape=WIDE), {str(Fault.parse(kill).seat) for kill in kills})
    assert struck(result) == set(kills)


# --- other topologies -------------------------------------------------------------------------------


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize(
    "shape, kill",
    [
        pytest.param(Shape(4, 1, 2), "kill 2.0 before 0I2.1@6", id="one stage, four replicas"),
        pytest.param(
            Shape(3, 3, 2, layers=5),
            "kill 1.1 after 1F1.0@6",
            id="3 x 3, seven layers, fewer micro-batches than stages",
        ),
        pytest.param(Shape(2, 2, 1), "kill 0.1 before 1REDUCE@6", id="one micro-batch"),
    ],
)
def test_other_topologies(launch, reference, shape, kill):
    result = launch(faults(kill), shape=shape).finish()
    assert_same_training(result, reference(shape=shape), {kill.split()[1]})


# --- negative controls ------------------------------------------------------------------------------


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("mistake", CONTROLS)
def test_a_mistake_in_the_recovery_would_be_seen(launch, reference, mistake):
    """The same kill and the same comparison; the recovery goes wrong, and the difference is ten times what is
    tolerated.
    """
    run = launch(faults("kill 0.1 before 1F0.1@10"), script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(CONTROLS[mistake]))
    result = run.finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == ["0.1"], result.output[-6000:]
    found = difference(result, reference())
    print(f"{mistake}: losses differ by {found.loss:.2g}, parameters by {found.parameters:.2g}")
    assert found.exceeds(10), found
