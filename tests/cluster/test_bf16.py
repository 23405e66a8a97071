"""bf16: the optimizer's state is whole on every worker, and gradients are summed in fp32, whoever dies.

The stock engine to compare with is the one at ZeRO stage 1 with sums and all-reduce in fp32: at stage 0 it sums in
bf16, and can't read its own checkpoints.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.half_precision import assert_same
from tests.support.jobs import (
    BF16,
    DEEPSPEED,
    LOSS_TOLERANCE,
    OFF,
    PARAMETER_TOLERANCE,
    SQUARE,
    STEPS,
    WRAPPED,
    Difference,
    Shape,
    assert_same_training,
    difference,
    faults,
)
from tests.support.kills import CONTROLS, FIRST, SECOND, matrix, one_stage_ahead, replica_lost
from tests.support.returns import LONG, assert_came_back, comes_back

ZERO_1 = (
    "deepspeed={bf16: {enabled: true}, zero_optimization: {stage: 1}, data_types: {grad_accum_dtype: fp32}, "
    "communication_data_type: fp32}"
)
STOCK = "recycle.enabled=false", ZERO_1
REPLICATED = ZERO_1, "recycle.zero=replicate"
MORE, THREE = pytest.mark.all_kills, Shape(replicas=3)


@pytest.mark.parametrize(
    "shape, config",
    ((SQUARE, REPLICATED), pytest.param(THREE, (BF16,), marks=MORE)),
    ids=("2 x 2, the same config", "3 x 2"),
)
def test_bit_for_bit_as_stock(launch, shape, config):
    stock = launch(*STOCK, shape=shape).finish()
    mine = launch(*OFF, *config, shape=shape).finish()
    assert mine.code == stock.code == 0 and not stock.of("start"), mine.output[-6000:] + stock.output[-6000:]
    assert mine.losses == pytest.approx(stock.losses, rel=3e-7)
    for rank in stock.records:
        one, other = mine.parameters(rank), stock.parameters(rank)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other), f"rank {rank}"
        assert {value.dtype for value in one.values()} == {torch.bfloat16}
    assert len(mine.of("zero")) == (config == REPLICATED)


# --- returns ----------------------------------------------------------------------------------------


@pytest.mark.some_of(1)
@pytest.mark.parametrize("config", ((BF16,), REPLICATED, (BF16, "model.tied=true")), ids=("bf16", "ZeRO 1", "tied"))
def test_a_newcomer_has_the_same_bits(launch, reference, tmp_path, config):
    """Its masters and moments come with the state."""
    more = (*config, "recycle.exact=true", "recycle.check_replicas=1")
    result = comes_back(launch, tmp_path, "kill 1.1 before 1W1.0@5", *more).finish()
    assert_came_back(result, reference(f"steps={LONG}", *more), "1.1", exact=True)


# --- kills ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tolerated(server, references) -> Difference:
    """Twice the spread of two runs without a failure that add the same gradients in another order; or what a weight
    makes that rounds to its neighbour: in fp32 most sums of a few bf16 numbers are exact, so that the spread may be
    nothing.
    """
    spread = difference(*(references(server, DEEPSPEED, SQUARE, BF16, *more) for more in (("recycle.exact=1",), ())))
    print(f"spread: losses {spread.loss:.2g}, parameters {spread.parameters:.2g}")
    return Difference(max(2 * spread.loss, 10 * LOSS_TOLERANCE), max(2 * spread.parameters, 10 * PARAMETER_TOLERANCE))


JOBS = {"bf16": (BF16,), "ZeRO 1": REPLICATED, "tied": (BF16, "model.tied=true")}
DEFAULT = (("bf16", 8),)


@pytest.mark.all_kills
@pytest.mark.parametrize(
    "job, number",
    [
        pytest.param(job, number, id=f"{job}: {pair[0]}, {pair[1]}", marks=[MORE] * ((job, number) not in DEFAULT))
        for job in JOBS
        for number, pair in enumerate(matrix())
    ],
)
def test_each_rank_at_named_instructions(launch, reference, tolerated, job, number):
    """The list of the main job, in fp32."""
    first, second = matrix()[number]
    kills = first.at(FIRST), second.at(SECOND)
    assert_same(
        launch(*JOBS[job], faults(*kills)).finish(), reference(*JOBS[job]), tolerated, {first.seat, second.seat}, kills
    )


@pytest.mark.parametrize("clip", (pytest.param("sync", marks=MORE), pytest.param("validate", marks=MORE)))
def test_kills_of_a_clipped_job(launch, reference, tolerated, clip):
    settings = BF16, "gradient_clipping=0.5", f"recycle.clip={clip}"
    kills = "kill 0.1 before 1REDUCE@5", "kill 1.0 after 0STEP@12"
    result, calm = launch(*settings, faults(*kills)).finish(), reference(*settings)
    assert difference(calm, reference(BF16)).exceeds(10), "nothing was clipped"
    assert_same(result, calm, tolerated, {"0.1", "1.0"}, kills)


@pytest.mark.all_kills
@pytest.mark.parametrize("ahead, point", ((0, "recovery.undone"), pytest.param(1, "recovery.report:2", marks=MORE)))
def test_a_loss_in_recovery_from_a_step_that_is_taken_back(launch, reference, tolerated, tmp_path, ahead, point):
    """The masters come back, and the weights with them."""
    kills = *replica_lost(ahead), f"kill 1.{ahead} at {point}"
    result = launch(
        BF16, faults(*kills), shape=THREE, script=WRAPPED, **one_stage_ahead(tmp_path, ahead, 7, 3)
    ).finish()
    assert_same(result, reference(BF16, shape=THREE), tolerated, {"0.0", "0.1", f"1.{ahead}"}, kills)
    assert any(event["undone"] for event in result.of("recovery_plan"))


@pytest.mark.all_kills
def test_kills_with_tied_weights(launch, reference, tolerated):
    """What is summed over the stages are the masters' gradients."""
    settings, kills = (BF16, "model.tied=true"), ("kill 0.0 before 0TIE@5", "kill 1.1 after 1TIE@12")
    result = launch(*settings, "recycle.check_replicas=4", faults(*kills)).finish()
    assert_same(result, reference(*settings), tolerated, {"0.0", "1.1"}, kills)


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[MORE] * (name != "one micro-batch dropped")) for name in CONTROLS]
)
def test_a_mistake_in_the_recovery_would_be_seen(launch, reference, tolerated, mistake):
    run = launch(
        BF16, faults("kill 0.1 before 1F0.1@10"), script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(CONTROLS[mistake])
    )
    result = run.finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == ["0.1"], result.output[-6000:]
    found = difference(result, reference(BF16))
    print(f"{mistake}: losses differ by {found.loss:.2g}, parameters by {found.parameters:.2g}")
    assert found.loss > 5 * tolerated.loss and found.parameters > 5 * tolerated.parameters, found


# --- checkpoints ------------------------------------------------------------------------------------

HALF = STEPS // 2


def test_stock_goes_on_from_a_degraded_checkpoint(trained_by_plan, tolerated, tmp_path):
    """Both stages have lost a worker; whoever is left writes the parts of all, and so do background checkpoints."""
    whole = trained_by_plan(BF16)
    degraded = trained_by_plan(
        *REPLICATED, faults("kill 0.0 before 0W0.0@3", "kill 1.1 after 1REDUCE@6"), save_at=[HALF]
    )
    assert {event["seat"] for event in degraded.of("lost")} == {"0.0", "1.1"}
    parts = {path.name for path in (tmp_path / "saved" / f"global_step{HALF}").glob("*_optim_states.pt")}
    assert parts == {
        f"bf16_zero_pp_rank_{replica}_mp_rank_{stage:02d}_optim_states.pt" for replica in range(2) for stage in range(2)
    }
    stock = trained_by_plan(*STOCK, load=True)
    assert {record["engine"] for record in stock.records.values()} == {"PipelineEngine"}
    assert stock.losses == pytest.approx(whole.losses[HALF:], abs=tolerated.loss)
    for rank in stock.records:
        one, other = stock.parameters(rank), whole.parameters(rank)
        assert all(torch.allclose(one[name], other[name], rtol=2**-7, atol=1e-6) for name in other), f"rank {rank}"


@pytest.mark.all_kills
def test_zero_1_in_fp32(launch, reference):
    """Stock shards the state and this plugin does not: the same training, also with kills."""
    zero = "deepspeed={zero_optimization: {stage: 1}}"
    stock = launch("recycle.enabled=false", zero, "model.dropout=0.0").finish()
    kills = "kill 0.1 before 1REDUCE@5", "kill 1.0 after 0STEP@12"
    mine = launch(zero, "recycle.zero=replicate", "model.dropout=0.0", faults(*kills)).finish()
    assert stock.code == 0 and stock.losses == pytest.approx(mine.losses, abs=LOSS_TOLERANCE)
    assert_same_training(mine, reference("model.dropout=0.0"), {"0.1", "1.0"})


@pytest.mark.all_kills
def test_from_stocks_checkpoint_and_from_one_of_three_replicas(trained_by_plan, tolerated):
    """Everywhere the same micro-batches, dealt out otherwise."""
    stock = trained_by_plan(*STOCK, "steps=12", save_at=[HALF])
    mine = trained_by_plan(BF16, "steps=12", load=True)
    assert mine.losses == pytest.approx(stock.losses[HALF:], abs=tolerated.loss)
    three = trained_by_plan(BF16, "steps=12", shape=Shape(replicas=4, micro_batches=1), load=True)
    assert three.losses == pytest.approx(stock.losses[HALF:], abs=tolerated.loss)


@pytest.mark.all_kills
def test_load_while_training_and_save_in_the_background(trained_by_plan, tolerated, tmp_path):
    whole = trained_by_plan(BF16, "steps=12")
    expected = whole.losses[:7] + whole.losses[3:]
    result = trained_by_plan(
        BF16, "steps=12", faults("kill 1.0 at load.start", "kill 0.1 at load.end"), save_at=[3], load_at=7, load_step=3
    )
    assert len(result.of("lost")) == 2 and result.losses == pytest.approx(expected, abs=tolerated.loss)
    folder = tmp_path / "own"
    made = trained_by_plan(
        BF16,
        "steps=40",
        "recycle.checkpoint={overhead: 0.9}",
        f"recycle.checkpoint_dir={folder}",
        faults("kill 0.0 before 0F0.0@5"),
    )
    assert made.of("checkpoint")
    (saved,) = {int(event["path"].rpartition("step")[2]) for event in made.of("checkpoint")[-1:]}
    again = trained_by_plan(BF16, "steps=40", load=True, folder=str(folder))
    assert again.losses == pytest.approx(made.losses[saved:], abs=tolerated.loss)
