"""fp16: master weights and sums in fp32 as in bf16, and DeepSpeed's loss scale, which overflows take down wherever they
are found, whoever dies meanwhile.

The stock engine to compare with is the one at ZeRO stage 1 with sums and all-reduce in fp32: at stage 0 it takes a
scale out of gradients that it has never put in.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.half_precision import (
    AS_SCALED,
    HALF,
    INFINITE,
    VALIDATED,
    assert_same,
    changes,
    fp16,
    scales,
    wrapped,
)
from tests.support.jobs import (
    LATE,
    LOSS_TOLERANCE,
    OFF,
    PARAMETER_TOLERANCE,
    SQUARE,
    STEPS,
    WRAPPED,
    Difference,
    Emulated,
    Shape,
    assert_bitwise,
    assert_in_order,
    curve,
    faults,
    on_deepspeed,
)
from tests.support.kills import one_stage_ahead, replica_lost
from tests.support.launching import launching
from tests.support.returns import LONG, assert_came_back, comes_back

MORE = pytest.mark.all_kills
TOLERATED = Difference(10 * LOSS_TOLERANCE, 10 * PARAMETER_TOLERANCE)  # a weight that rounds to its neighbour


REPLICATED = "recycle.zero=replicate"


def test_bit_for_bit_as_stock(launch, tmp_path):
    """Through overflows that cost hysteresis, or take the scale down, and steps that take it up."""
    config = fp16(1, initial_scale_power=21, hysteresis=2)
    monitors = [
        {"name": "with_config", "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": name}}
        for name in ("stock", "mine")
    ]
    stock = launch("recycle.enabled=false", config, **wrapped(AS_SCALED, monitors[0])).finish()
    mine = launch(*OFF, config, REPLICATED, **wrapped(monitors[1])).finish()
    assert not stock.of("start")
    assert_bitwise(mine, stock)
    theirs, found = (curve(tmp_path / name, "Train_Samples_loss_scale") for name in ("stock", "mine"))
    assert found == theirs and len(found) == STEPS
    values = [2.0**21, *found.values()]
    assert values[1] == values[0] > values[2] and any(after > before for before, after in zip(values, values[1:]))


@MORE
def test_inputs_are_cast_as_in_stock(launch):
    """Vectors in fp32, which layers in fp16 refuse."""
    config, shape = fp16(1, auto_cast=True), Emulated(each_ms=0)
    stock = launch("recycle.enabled=false", config, shape=shape, **wrapped(AS_SCALED)).finish()
    mine = launch(config, REPLICATED, faults("kill 0.1 before 1F0.1@8"), shape=shape, **wrapped()).finish()
    assert stock.code == mine.code == 0, stock.output[-6000:] + mine.output[-6000:]
    assert mine.losses == pytest.approx(stock.losses, abs=TOLERATED.loss) and mine.losses[-1] < mine.losses[0]
    without = launch(fp16(1), REPLICATED, shape=shape, **wrapped()).finish()
    assert without.losses[0] != mine.losses[0]


# --- kills ------------------------------------------------------------------------------------------

JOBS = {
    "fp16": (),
    "clipped": ("gradient_clipping=0.5",),
    "tied": ("model.tied=true",),
    "exact": ("recycle.exact=true",),
    "static": (),
}
KILLS = ("kill 0.1 after 1STEP@4", "kill 1.0 before 0STEP@9"), ("kill 0.0 before 0REDUCE@4", "kill 1.1 after 1W1.1@9")


@pytest.mark.parametrize(
    "job, kills",
    [
        pytest.param(job, kills, id=f"{job}, {number}", marks=[MORE] * ((job, number) != ("fp16", 0)))
        for job in JOBS
        for number, kills in enumerate(KILLS)
    ],
)
def test_kills_where_steps_overflow(launch, job, kills):
    """One stage overflows, and the other has applied the step; the job to compare with waits for each step's norm."""
    settings = (fp16(loss_scale=64.0 if job == "static" else 0), *JOBS[job])
    waited = launch(*settings, "recycle.clip=sync", **wrapped(INFINITE)).finish()
    result = launch(*settings, VALIDATED, faults(*kills), **wrapped(INFINITE)).ended_well()
    assert not waited.of("rejected") and {4, 9} <= {event["step"] for event in result.of("rejected")}
    tolerated = Difference(0.0, 0.0) if job == "exact" else TOLERATED
    assert_same(result, waited, tolerated, {kill.split()[1] for kill in kills}, kills)
    assert changes(result) == changes(waited) == ({} if job == "static" else dict(scales({4, 9})))


@pytest.mark.parametrize("stage", (0, pytest.param(1, marks=MORE)))
def test_a_newcomer_follows_steps_that_overflow(launch, tmp_path, stage):
    """Some before it comes, and, where steps take their time, some of those that it follows: scale and counts are the
    others'.
    """
    overflows = INFINITE | {"at": [f"1W0.1@{step}" for step in range(4, LONG, 10)]}
    settings = (fp16(stage), VALIDATED, "recycle.exact=true", *[REPLICATED] * stage)
    result = comes_back(launch, tmp_path, "kill 1.1 before 1W1.0@5", *settings, wraps=(HALF, overflows)).finish()
    whole = launch(f"steps={LONG}", *settings, **wrapped(overflows)).finish()
    assert_came_back(result, whole, "1.1", exact=True)
    assert changes(result) == changes(whole)


@MORE
def test_on_an_accelerator(server, tmp_path):
    """The stand-in, whose kernels are the CPU's."""
    settings, kills = (fp16(), VALIDATED), KILLS[0]
    with launching(server, tmp_path) as launch:
        on_cpu = launch(*settings, **wrapped(INFINITE)).finish()
        wraps = on_deepspeed(HALF, INFINITE)
        result = launch(*settings, faults(*kills), script=WRAPPED, **wraps, **LATE).finish()
    assert_same(result, on_cpu, TOLERATED, {kill.split()[1] for kill in kills}, kills)
    assert_in_order(result)
    assert changes(result) == changes(on_cpu)


@MORE
@pytest.mark.parametrize("ahead", (0, 1))
def test_a_step_that_has_raised_the_scale_is_taken_back(launch, tmp_path, ahead):
    """By stages that have to make again what a lost replica alone had; they raise it once."""
    settings, shape, kills = (fp16(loss_scale_window=2), VALIDATED), Shape(replicas=3), replica_lost(ahead)
    gate = json.loads(one_stage_ahead(tmp_path, ahead, 7, 3)["RECYCLE_TEST_WRAP"])
    calm = launch(*settings, shape=shape, **wrapped()).finish()
    result = launch(*settings, faults(*kills), shape=shape, **wrapped(gate)).finish()
    assert_same(result, calm, TOLERATED, {"0.0", "0.1"}, kills)
    undone = {event["seat"] for event in result.of("recovery_plan") if event["undone"]}
    assert undone == {f"1.{ahead}", f"2.{ahead}"} and changes(result) == changes(calm) and 7 in changes(calm)


# --- checkpoints ------------------------------------------------------------------------------------

HALF_WAY = STEPS // 2


@pytest.fixture
def train(trained_by_plan):
    return partial(trained_by_plan, half=True)


GOING_UP = {"initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 2}


@pytest.mark.parametrize("stage", (pytest.param(0, marks=MORE), 1))
def test_stock_goes_on_from_a_degraded_checkpoint(train, stage):
    """Both stages have lost a worker.  The scale is the same; at stage 0 stock's gradients are others."""
    config = fp16(stage, **GOING_UP)
    kills = faults("kill 0.0 before 0W0.0@3", "kill 1.1 after 1REDUCE@6")
    degraded = train(config, *([REPLICATED] * stage), kills, save_at=[HALF_WAY])
    assert {event["seat"] for event in degraded.of("lost")} == {"0.0", "1.1"}
    assert {step <= HALF_WAY for step in changes(degraded)} == {True, False}, (
        "the scale is another one before and after"
    )
    stock = train("recycle.enabled=false", config, load=True, unscaled_as_scaled=True)
    assert {record["engine"] for record in stock.records.values()} == {"PipelineEngine"}
    same = STEPS if stage == 1 else 1
    assert stock.losses[:same] == pytest.approx(degraded.losses[HALF_WAY:][:same], abs=TOLERATED.loss)


@MORE
@pytest.mark.parametrize("stage", (0, 1))
def test_the_scale_goes_on_from_a_checkpoint(train, stage):
    """Also with another number of replicas, and where nothing but the weights is loaded.

    Each micro-batch's loss counts twice where a replica has one of them, so that scales must not be at their limit.
    """
    config = fp16(stage, **GOING_UP | {"initial_scale_power": 10}), *([REPLICATED] * stage)
    whole = train(*config, save_at=[HALF_WAY])
    for shape in SQUARE, Shape(replicas=4, micro_batches=1):
        again = train(*config, shape=shape, load=True)
        assert again.losses == pytest.approx(whole.losses[HALF_WAY:], abs=TOLERATED.loss)
        assert changes(again) == {step: scale for step, scale in changes(whole).items() if step > HALF_WAY}
        assert not again.of("warning")
    weights = train(*config, load=True, module_only=True)
    assert weights.losses[1] < whole.losses[1] - 0.05, "the first step has begun with other masters"
    assert next(iter(changes(weights).items())) == next(iter(changes(whole).items()))


@MORE
@pytest.mark.parametrize("stage", (0, 1))
def test_from_stocks_checkpoint(train, tmp_path, stage):
    """At stage 1 all goes on as there; at stage 0 the state is read that stock has made of its gradients."""
    config, replicated = fp16(stage, **GOING_UP), [REPLICATED] * stage
    stock = train("recycle.enabled=false", config, save_at=[HALF_WAY], unscaled_as_scaled=True)
    mine = train(config, *replicated, load=True)
    assert mine.losses[0] == pytest.approx(stock.losses[HALF_WAY], abs=TOLERATED.loss)
    if stage == 1:
        assert mine.losses == pytest.approx(stock.losses[HALF_WAY:], abs=TOLERATED.loss)
        train(config, *replicated, save_at=[HALF_WAY], folder=str(tmp_path / "mine"))
        theirs, ours = (counted(tmp_path / name / f"global_step{HALF_WAY}") for name in ("saved", "mine"))
        assert ours == theirs and 0 < ours["skipped_steps"] < HALF_WAY == ours["global_steps"]


def counted(checkpoint: Path) -> dict:
    """The counts of steps in ``checkpoint``, and its loss scale with all that decides on the next one."""
    state = torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False)
    part = torch.load(checkpoint / "zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=False)
    counts = {name: state[name] for name in ("skipped_steps", "global_steps", "global_samples")}
    return counts | vars(part["optimizer_state_dict"]["loss_scaler"])
