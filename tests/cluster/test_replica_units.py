"""Replicas as the unit of a loss, of real processes: one goes whole, comes back whole, and meanwhile the batch stays as
it is, or shrinks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.jobs import shrinking
from tests.support.cluster import Result
from tests.support.jobs import LOSS_TOLERANCE, PARAMETER_TOLERANCE, WRAPPED, Shape, difference, faults, held
from tests.support.launching import Launch

WIDE = Shape(3, 2, 2)
STEPS, HELD = 60, 12  # the others wait at this step until the newcomers' processes are there


def comes_back(launch: Launch, folder: Path, script: str, held_at: int, *more: str) -> Result:
    """The job in which the others go on once all of replica 1 have asked to take part again."""
    wrap = json.dumps([held(folder, held_at, "go")])
    run = launch(
        "recycle.rejoin=always", "recycle.unit=replica", *more, shape=WIDE, script=script, RECYCLE_TEST_WRAP=wrap
    )
    run.wait_for(
        lambda: {event["seat"] for event in run.of("newcomer")} == {"1.0", "1.1"},
        "newcomers",
    )
    (folder / "go").touch()
    return run.ended_well()


def assert_went_and_came_whole(result: Result, killed: str) -> None:
    lost, mate = result.of("lost"), {"1.0": "1.1", "1.1": "1.0"}[killed]
    assert [event["seat"] for event in lost] == [killed, mate], result.output[-6000:]
    assert lost[1]["cause"] == "together" and f"it is given up with seat {killed}" in lost[1]["text"]
    assert {event["seat"] for event in result.of("rejoined")} == {"1.0", "1.1"}
    assert len({event["step"] for event in result.of("rejoined")}) == 1, "it has work once it is whole"
    assert {event["rank"] for event in result.of("restart")} == {result.rank_of("1.0"), result.rank_of("1.1")}
    assert not result.of("not_restarted") and len(result.records) == WIDE.ranks


@pytest.mark.plain_too
@pytest.mark.some_of(1)
@pytest.mark.parametrize("kill", ("kill 1.1 before 1F1.0@5", "kill 1.0 before 0REDUCE@5"))
def test_a_replica_goes_whole_and_comes_back_whole(launch: Launch, reference, tmp_path, kill):
    """Its work is the others' meanwhile: losses and weights are those of the run without a failure."""
    result = comes_back(launch, tmp_path, WRAPPED, HELD, f"steps={STEPS}", faults(kill))
    assert_went_and_came_whole(result, kill.split()[1])
    assert difference(result, reference(f"steps={STEPS}", shape=WIDE)).tolerated
    (said,) = result.of("recovery")
    assert said["text"].startswith("replica 1 is lost as a whole: other replicas take its work")


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.some_of(2)
@pytest.mark.parametrize(
    "kill, kept",
    [
        pytest.param("kill 1.0 before 0F1.1@5", False, id="in a forward"),
        pytest.param("kill 1.1 before 1REDUCE@5", False, id="before a sum"),
        pytest.param("kill 1.0 before 0REDUCE@5", False, id="when one stage has its sum"),
        pytest.param("kill 1.1 before 1STEP@5", True, id="when all have their sums"),
    ],
)
def test_a_batch_shrinks_as_long_as_a_replica_is_out(launch: Launch, tmp_path, kill, kept):
    """As in one process that is told which replicas each step has; and the rates that the script reads are those of its
    scheduler.
    """
    result = comes_back(launch, tmp_path, "tests/jobs/shrinking.py", HELD, "recycle.batch=shrink", faults(kill))
    assert_went_and_came_whole(result, kill.split()[1])
    fewer = {event["step"]: event["contributed"] for event in result.of("committed") if "contributed" in event}
    back = result.of("rejoined")[0]["step"]
    assert fewer == {step: [0, 2] for step in range(5 + kept, back)}
    losses, model = shrinking.alone(WIDE.replicas, WIDE.micro_batches, fewer)
    for record in result.records.values():
        assert record["losses"] == pytest.approx(losses, abs=LOSS_TOLERANCE)
        rates = [0.05 * shrinking.GAMMA**step for step in range(1, shrinking.STEPS + 1)]
        assert record["rates"] == pytest.approx(rates, rel=1e-12)
    for rank in result.records:
        for name, mine in result.parameters(rank).items():
            assert (mine - model.state_dict()[name]).abs().max() < PARAMETER_TOLERANCE
    full, _ = shrinking.alone(WIDE.replicas, WIDE.micro_batches, {})
    assert max(abs(one - two) for one, two in zip(losses, full)) > 100 * LOSS_TOLERANCE
    (said,) = result.of("recovery")
    assert said["text"].startswith("replica 1 is lost as a whole: nobody does its work")


@pytest.mark.parametrize("kill", ("kill 1.0 before 0F1.1@4", "kill 1.1 before 1STEP@4"))
def test_plain_iterators_of_a_replica_rest_while_it_is_out(launch: Launch, tmp_path, kill):
    """And go on at their places: of each replica all samples up to some are used, once, and none while it is out."""
    steps, each_step = 40, 4  # samples of a replica
    folder = tmp_path / "run0"
    settings = {"unit": "replica", "batch": "shrink"}
    job = {"folder": str(folder), "faults": [kill], "steps": steps, "case": "plain", "held": HELD, "replicas": 3}
    job |= {"stages": 2, "recycle": settings}
    run = launch(shape=WIDE, script="tests/jobs/iterators.py", RECYCLE_TEST_ITERATORS=json.dumps(job))
    run.hear("newcomer", 2)
    (folder / "go").touch()
    result = run.ended_well()
    fewer = {event["step"]: event["contributed"] for event in result.of("committed") if "contributed" in event}
    assert fewer and set(map(tuple, fewer.values())) == {(0, 2)} and max(fewer) < steps
    assert not [event for event in result.of("data") if "retired" in event], "nobody draws for it"
    assert [event for event in result.of("data") if "its iterator rests" in event["text"]]
    for file in folder.glob("rows/rank*.pt"):
        rows = torch.load(file)["rows"].reshape(3, -1)
        for replica, mine in enumerate(rows):
            shares = [fewer.get(step, [0, 1, 2]) for step in range(1, steps + 1)]
            live = [len(share) / 3 for share in shares if replica in share]
            used = [each**0.5 / each for each in live for _ in range(each_step)]
            assert mine.abs()[: len(used)].mul(6).tolist() == pytest.approx(used, rel=1e-5)
            assert not mine[len(used) :].any()
