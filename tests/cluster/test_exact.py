"""Exact mode: losses, parameters and optimizer state have the bits of the exact run without a failure, after every
step, whoever fails.

Dropout is on; the control at the end shows that without exact mode the same failure changes bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from tests.support import double_faults
from tests.support.cluster import Result
from tests.support.jobs import BF16, DEEPSPEED, PLAIN, SQUARE, STEPS, WRAPPED, Shape, faults
from tests.support.kills import CLIPPED, FIRST, FUSED, SECOND, Kill, kill_all, matrix, named, schedules
from tests.support.launching import launching

EXACT = "recycle.exact=true"
SGD = {DEEPSPEED: ("optimizer=sgd", "optimizer.params.momentum=0.9"), PLAIN: ("optimizer=sgd",)}  # with momentum
WIDE = Shape(replicas=4)


def recorded(folder) -> dict:
    return {"name": "record_states", "folder": str(folder / "run0" / "states")}


@pytest.fixture
def train(launch, tmp_path) -> Callable[..., Result]:
    """``train(*overrides, shape=)``: a job that records its states."""

    def run(*more: str, shape: Shape = SQUARE) -> Result:
        return launch(*more, shape=shape, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(recorded(tmp_path))).ended_well()

    return run


@pytest.fixture(scope="module")
def calm_results() -> dict[tuple, Result]:
    return {}


@pytest.fixture
def calm(request, vehicle, tmp_path_factory, calm_results) -> Callable[..., Result]:
    """``calm(*overrides, shape=)``: that job without a failure; each is run once."""

    def run(*more: str, shape: Shape = SQUARE) -> Result:
        if (key := (vehicle, shape, more)) not in calm_results:
            folder = tmp_path_factory.mktemp("calm")
            with launching(request.getfixturevalue(vehicle.server), folder, vehicle=vehicle) as launch:
                result = launch(
                    *more, shape=shape, script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(recorded(folder))
                ).finish()
            assert result.code == 0 and not result.of("lost"), result.output[-6000:]
            calm_results[key] = result
        return calm_results[key]

    return run


def states(result: Result, rank: int) -> dict[int, str]:
    """The last word on each step: one that was taken back is applied again."""
    lines = (result.folder / "states" / f"rank{rank}.txt").read_text().splitlines()
    return {int(step): digest for step, digest in map(str.split, lines)}


def differing(result: Result, reference: Result) -> list[str]:
    """What is not the same to the bit, by name; who comes back has only a part of its state before it has caught up."""
    found = [
        f"loss of step {step}"
        for step, (one, two) in enumerate(zip(result.losses, reference.losses, strict=True), 1)
        if one != two
    ]
    was_away = {each["seat"] for each in result.of("lost")}
    whole = {each["rank"]: each["step"] for each in result.of("caught_up")}  # from which step on
    for rank in result.records:
        mine, theirs = states(result, rank), states(reference, rank)
        assert set(mine) <= set(theirs) == set(range(1, STEPS + 1))
        assert set(mine) == set(theirs) or result.seat_of(rank) in was_away
        # the one after which it was whole it may have applied in part
        steps = [step for step in mine if step > whole.get(rank, 0)]
        found += [f"state of rank {rank} after step {step}" for step in steps if mine[step] != theirs[step]]
        mine, theirs = result.parameters(rank), reference.parameters(rank)
        found += [f"{name} of rank {rank}" for name in theirs if not torch.equal(mine[name], theirs[name])]
    return found


def assert_exact(result: Result, reference: Result, lost: set[str], struck: tuple[str, ...] = ()) -> None:
    """Who has come back by the end counts like the others."""
    assert {event["seat"] for event in result.of("lost")} == lost
    at_the_end, all_seats = ({result.seat_of(rank) for rank in ranks} for ranks in (result.records, result.pids))
    back = {event["seat"] for event in result.of("caught_up")}
    assert all_seats - lost <= at_the_end <= (all_seats - lost) | back
    assert {event["fault"] for event in result.of("fault")} >= set(struck)
    assert not differing(result, reference)


# --- every seat, every kind of instruction ------------------------------------------------------------


@pytest.mark.plain_too
@pytest.mark.some_of(4)
@pytest.mark.parametrize("first, second", [pytest.param(*pair, id=f"{pair[0]}, {pair[1]}") for pair in matrix()])
def test_each_rank_at_named_instructions(train, calm, first: Kill, second: Kill):
    kills = first.at(FIRST), second.at(SECOND)
    assert_exact(train(EXACT, faults(*kills)), calm(EXACT), {first.seat, second.seat}, kills)


@pytest.mark.plain_too(deepspeed=False)
def test_work_that_moves_away_from_a_slow_worker_changes_no_bit(launch, calm, tmp_path):
    blocks = "recycle.exact=1"
    wrap = json.dumps([recorded(tmp_path), {"name": "slow", "seat": "1.0", "times": 3, "steps": [3, 12]}])
    result = launch(blocks, "recycle.rebalance=true", script=WRAPPED, RECYCLE_TEST_WRAP=wrap).ended_well()
    assert "1.0" in {event["seat"] for event in result.of("rebalance")}
    assert_exact(result, calm(blocks), set())


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize(
    "settings, kills",
    [
        pytest.param((CLIPPED,), ("kill 0.1 before 1VALIDATE@5", "kill 1.0 after 0VALIDATE@9"), id="clipped"),
        pytest.param(
            (CLIPPED, "recycle.clip=validate"), ("kill 0.1 before 1REDUCE@5", "kill 1.0 after 0STEP@9"), id="validated"
        ),
        pytest.param((FUSED,), ("kill 0.0 after 0B0.0@5", "kill 1.1 before 1B1.1@9"), id="fused"),
        pytest.param(("recycle.exact=1",), ("kill 1.0 after 0W1.0@5", "kill 1.1 before 1W1.1@9"), id="blocks of one"),
        pytest.param(("recycle.keep_bytes=1",), ("kill 0.1 before 1W0.1@6",), id="nothing is kept"),
    ],
)
def test_other_settings(train, calm, settings, kills):
    assert_exact(
        train(EXACT, *settings, faults(*kills)), calm(EXACT, *settings), {kill.split()[1] for kill in kills}, kills
    )


@pytest.mark.plain_too(deepspeed=False)
def test_sgd_with_momentum(train, calm, vehicle):
    kills = "kill 1.1 after 1W1.0@5", "kill 0.0 before 0I0.1@9"
    assert_exact(train(EXACT, *SGD[vehicle], faults(*kills)), calm(EXACT, *SGD[vehicle]), {"1.1", "0.0"}, kills)


@pytest.mark.parametrize(
    "settings, kills",
    [
        pytest.param((), ("kill 0.1 before 1I0.1@5", "kill 1.0 after 0REDUCE@9"), id="bf16"),
        pytest.param(
            (CLIPPED, "recycle.clip=validate"),
            ("kill 0.1 after 1STEP@5", "kill 1.0 before 0W1.0@9"),
            id="validated",
            marks=pytest.mark.all_kills,
        ),
        pytest.param(
            (FUSED,), ("kill 1.1 after 1B1.0@5", "kill 0.0 before 0STEP@9"), id="fused", marks=pytest.mark.all_kills
        ),
    ],
)
def test_bf16(train, calm, settings, kills):
    """DeepSpeed's."""
    assert_exact(
        train(EXACT, BF16, *settings, faults(*kills)),
        calm(EXACT, BF16, *settings),
        {kill.split()[1] for kill in kills},
        kills,
    )


# --- several at once, and stops -----------------------------------------------------------------------


@pytest.mark.some_of(1)
@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize(
    "settings, kills",
    [
        (("recycle.exact=2", "topology.micro_batches=4"), ("kill 0.1 before 1W0.2@6", "kill 2.1 after 1W2.1@6")),
        ((), ("kill 3.0 before 0REDUCE@6", "kill 1.1 after 1REDUCE@6")),
        ((), ("kill 1.0 before 0I1.0@5", "kill 3.0 at recovery.report:2")),
    ],
)
def test_two_of_eight(train, calm, settings, kills):
    assert_exact(
        train(EXACT, *settings, faults(*kills), shape=WIDE),
        calm(EXACT, *settings, shape=WIDE),
        {kill.split()[1] for kill in kills},
        kills,
    )


@pytest.mark.plain_too(deepspeed=False)
def test_a_worker_that_is_stopped(train, calm):
    fault = "stop 0.1 before 1F0.1@6"
    assert_exact(train(EXACT, "recycle.progress_timeout_s=2", faults(fault)), calm(EXACT), {"0.1"}, (fault,))


# --- from outside, and seeded ------------------------------------------------------------------------------


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.some_of(2)
@pytest.mark.parametrize("kills", [pytest.param(kills, id=named(kills)) for kills in schedules()])
def test_kills_from_outside(launch, calm, tmp_path, kills):
    result = kill_all(launch, tmp_path / "gate", kills, EXACT, others=(recorded(tmp_path),))
    assert result.code == 0, result.output[-6000:]
    assert_exact(result, calm(EXACT), {seat for _, seats in kills for seat in seats})


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.some_of(2)
@pytest.mark.parametrize("seed", range(12))
def test_kills_close_together(launch, calm, tmp_path, seed):
    """Those of tests/support/double_faults.py, on 4 x 2 and 3 x 3."""
    given = double_faults.scenario(seed)
    settings = tuple(each for each in given.variant if each != "recycle.undo=inverse")
    result = double_faults.kill_all(launch, tmp_path / "gate", given, EXACT, *settings, others=(recorded(tmp_path),))
    assert result.code == 0, result.output[-6000:]
    struck = {event["fault"].split()[1] for event in result.of("fault")}
    assert struck
    alike = [each for each in settings if "keep_bytes" not in each]
    assert_exact(
        result, calm(EXACT, *alike, shape=given.shape), struck | ({given.outside[0]} if given.outside else set())
    )


# --- controls -------------------------------------------------------------------------------------------


@pytest.mark.plain_too(deepspeed=False)
def test_without_exact_mode_the_same_failure_changes_bits(train, calm):
    result = train(faults("kill 1.1 after 1W1.0@5"))
    found = differing(result, calm())
    assert "loss of step 5" not in found and any(f"after step {STEPS}" in each for each in found), found


@pytest.mark.plain_too(deepspeed=False)
def test_the_exact_run_trains_what_the_other_does(calm):
    exact, other = calm(EXACT), calm()
    assert exact.losses == pytest.approx(other.losses, abs=5e-6)
    assert [run.of("start")[0]["job"]["exact"] for run in (exact, other)] == [True, False]
