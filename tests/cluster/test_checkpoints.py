"""Checkpoints, evaluation and reading parameters, with everybody there and while degraded."""

from __future__ import annotations

import pytest

from tests.support.jobs import LOSS_TOLERANCE, PARAMETER_TOLERANCE, STEPS, assert_same_training, faults
from tests.support.returns import HELD, LONG

HALF = STEPS // 2


def parameter_difference(mine: dict, theirs: dict) -> float:
    delta, norm = (
        sum(each.double().pow(2).sum().item() for each in side)
        for side in ([mine[n] - theirs[n] for n in theirs], theirs.values())
    )
    return (delta / norm) ** 0.5


@pytest.mark.parametrize("tied", (pytest.param("false", marks=pytest.mark.all_kills), "true"))
def test_stock_goes_on_from_a_degraded_checkpoint(trained_by_plan, tied):
    """Both stages have lost a worker, rank 0 among them, when the checkpoint is written; ``tied``: they also share a
    weight.
    """
    model = f"model.tied={tied}"
    whole = trained_by_plan(model, evaluate_at=HALF)
    ((evaluated,),) = {tuple(record["evaluated"]) for record in whole.records.values()}
    degraded = trained_by_plan(
        model, faults("kill 0.0 before 0W0.0@3", "kill 1.1 after 1REDUCE@6"), save_at=[HALF], evaluate_at=HALF
    )
    assert_same_training(degraded, whole, {"0.0", "1.1"})
    (refusal,) = {record["refused"] for record in degraded.records.values()}
    assert "0.0, 1.1" in refusal and "lost" in refusal
    assert all(
        record["evaluated"] == pytest.approx([evaluated], abs=LOSS_TOLERANCE) for record in degraded.records.values()
    )
    stock = trained_by_plan(model, "recycle.enabled=false", load=True)
    assert {record["engine"] for record in stock.records.values()} == {"PipelineEngine"}
    assert stock.losses == pytest.approx(whole.losses[HALF:], abs=LOSS_TOLERANCE)
    assert all(
        record["evaluated"] == pytest.approx([evaluated], abs=LOSS_TOLERANCE) for record in stock.records.values()
    )
    for rank in stock.records:
        assert parameter_difference(stock.parameters(rank), whole.parameters(rank)) <= PARAMETER_TOLERANCE


@pytest.mark.plain_too(deepspeed=False)
def test_a_job_goes_on_from_a_degraded_checkpoint(trained_by_plan):
    whole = trained_by_plan(evaluate_at=HALF)
    degraded = trained_by_plan(
        faults("kill 0.0 before 0W0.0@3", "kill 1.1 after 1REDUCE@6"), save_at=[HALF], evaluate_at=HALF
    )
    again = trained_by_plan(load=True)
    assert_same_training(degraded, whole, {"0.0", "1.1"})
    assert again.losses == pytest.approx(whole.losses[HALF:], abs=LOSS_TOLERANCE) and len(again.losses) == STEPS - HALF
    ((evaluated,),) = {tuple(record["evaluated"]) for record in whole.records.values()}
    assert all(
        record["evaluated"] == pytest.approx([evaluated], abs=LOSS_TOLERANCE)
        for result in (degraded, again)
        for record in result.records.values()
    )
    for rank in again.records:
        assert parameter_difference(again.parameters(rank), whole.parameters(rank)) <= PARAMETER_TOLERANCE


@pytest.mark.plain_too
def test_a_job_goes_on_from_a_checkpoint_of_a_worker_that_has_come_back(by_plan, tmp_path):
    """The worker of rank 0's seat, which writes part of the checkpoint; both jobs together are one training."""
    whole = by_plan(f"steps={LONG + HALF}").ended_well()
    first = by_plan(
        f"steps={LONG}", "recycle.rejoin=always", faults("kill 0.0 before 0F0.1@5"), wait_at=HELD, save_at=[LONG]
    )
    first.hear("newcomer")
    (tmp_path / "flags" / "go").touch()
    saved = first.ended_well()
    again = by_plan(f"steps={LONG + HALF}", load=True).ended_well()
    (lost,), (back,) = saved.of("lost"), saved.of("rejoined")
    assert lost["seat"] == back["seat"] == "0.0" and back["step"] < LONG
    assert saved.losses + again.losses == pytest.approx(whole.losses, abs=LOSS_TOLERANCE)
    assert again.records.keys() == whole.records.keys()
    for rank in again.records:
        assert parameter_difference(again.parameters(rank), whole.parameters(rank)) <= PARAMETER_TOLERANCE


@pytest.mark.plain_too
def test_reading_parameters_waits_for_the_commit(trained_by_plan):
    records = trained_by_plan("recycle.trace=true", read_at=6).records
    for rank in (2, 3):
        assert (records[rank]["committed_before"], records[rank]["committed_after"]) == (5, 6)
