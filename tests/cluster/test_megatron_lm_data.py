"""Where the data of a Megatron-LM job begin that goes on from a checkpoint: where stock's do."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from tests.support import megatron_lm
from tests.support.jobs import held
from tests.support.megatron_lm_jobs import (
    EVALUATES,
    Flags,
    Jobs,
    Trained,
    assert_same_weights,
    evaluations,
    gpt,
    ramped_up,
    trained,
)
from tests.support.returns import HELD

pytestmark = pytest.mark.skipif(megatron_lm.home() is None, reason=megatron_lm.MISSING)


TORCH = "--ckpt-format", "torch"
LONG = "--train-iters", "40"


def saved(job: Jobs, folder: Path, *more: str) -> Trained:
    """A job of two replicas, of which one is lost, that ends with a checkpoint after step 3."""
    saving = *TORCH, "--save", str(folder), "--save-interval", "3", "--exit-interval", "3"
    # in its first step, since a lost worker leaves no word of earlier ones
    kill = {"rejoin": "never", "faults": ["kill 0.0 before 0F0.1@1"]}
    before = job(gpt(1, 2, *LONG, *saving, *more, micro_batches=3), kill)
    assert before.ranks.keys() == {1} and samples(before) == [{*range(6 * step, 6 * step + 6)} for step in range(3)]
    return before


def gone_on(job: Jobs, folder: Path, flags: Flags, begun: int = 3) -> tuple[Trained, Trained]:
    """What stock Megatron-LM leaves with ``flags``, and the plugin, where a worker is lost in the first step, after
    step ``begun``, and comes back.
    """
    stock = job(flags)
    kill = {"exact": True, "rejoin": "always", "faults": [f"kill 1.0 before 0F1.1@{begun + 1}"]}
    run = job.start(flags, kill, held(folder, HELD, "go"))
    run.hear("newcomer")
    (folder / "go").touch()
    ours = trained(run)
    assert len(ours.result.of("rejoined")) == 1 and ours.ranks.keys() == stock.ranks.keys()
    return stock, ours


def samples(of: Trained) -> list[set[int]]:
    ranks = [each["samples"] for each in of.ranks.values()]
    return [{*chain.from_iterable(step)} for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("counts", [True, False], ids=("", "uncounted"))
def test_data_go_on_behind_the_consumed_samples_with_other_replicas_and_who_comes_back(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """Also from a checkpoint that does not count them, as of older releases: there are as many as its steps had. The
    validation data go on as well.
    """
    if not counts:
        monkeypatch.setenv("RECYCLE_TEST_UNCOUNTED", "1")
    saved(job, tmp_path / "saved")
    loading = gpt(1, 3, *LONG, *EVALUATES, *TORCH, "--load", str(tmp_path / "saved"), micro_batches=2)
    stock, ours = gone_on(job, tmp_path, loading)
    assert samples(ours) == samples(stock) == [{*range(6 * step, 6 * step + 6)} for step in range(3, 40)]
    assert last_evaluations(ours) == pytest.approx(last_evaluations(stock), abs=5e-6)


def last_evaluations(of: Trained) -> dict[str, float]:
    """The evaluations after the last step, in which the data of all replicas take part: everybody is back by then."""
    found = {place: loss for place, loss in evaluations(of).items() if "iteration 40" in place}
    assert len(found) == 3, found
    return found


@pytest.mark.parametrize(
    "more, first, begun",
    [
        (("--override-opt_param-scheduler",), 18, 3),
        (("--override-opt_param-scheduler", "--lr-decay-style", "linear"), 18, 3),
        (("--use-checkpoint-opt_param-scheduler", "--lr-decay-style", "linear"), 18, 3),
        (("--no-load-optim", "--no-load-rng"), 18, 3),
        (("--finetune",), 0, 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_flag_takes_from_a_checkpoint_is_what_stock_takes(
    job: Jobs, tmp_path: Path, more: tuple[str, ...], first: int, begun: int
) -> None:
    """With another size of the batch, and to the bit, also by a worker that comes back."""
    saved(job, tmp_path / "saved")
    loading = gpt(1, 2, *LONG, *TORCH, "--load", str(tmp_path / "saved"), *more, micro_batches=4)
    stock, ours = gone_on(job, tmp_path, loading, begun)
    assert samples(ours) == samples(stock) == [{*range(k, k + 8)} for k in range(first, first + 8 * (40 - begun), 8)]
    assert_same_weights(ours, stock)


def test_data_that_end_before_the_last_step_are_refused_before_the_first(
    job: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECYCLE_TEST_SAMPLES", "47")
    refused = job.start(gpt(2, 2), {}).finish()
    assert refused.code == 1 and not refused.of("step")
    assert "Traceback" not in refused.output
    assert "steps 1 to 6 need 48 samples, and the training data have 47 of 47 left" in refused.output


def test_a_number_of_samples_is_refused_if_the_checkpoint_counts_none(
    job: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock asserts that there is none."""
    monkeypatch.setenv("RECYCLE_TEST_UNCOUNTED", "1")
    saved(job, tmp_path / "saved")
    loading = *TORCH, "--load", str(tmp_path / "saved"), "--override-opt_param-scheduler"
    refused = job.start(ramped_up(1, 2, 80, *loading), {}).finish()
    assert refused.code == 1 and not refused.of("step")
    assert f"the checkpoint of step 3 in {tmp_path / 'saved'} does not count its samples" in refused.output
    assert "Traceback" not in refused.output


def test_a_ramp_of_batch_sizes_goes_on_where_the_checkpoint_left_it(job: Jobs, tmp_path: Path) -> None:
    """Behind its last rise; who comes back begins with the number of micro-batches that the others began with."""
    flags = lambda *more: ramped_up(1, 2, 8 + 8 * 38, *TORCH, *more)
    saving = "--save", str(tmp_path / "saved"), "--save-interval", "4", "--exit-interval", "4"
    job(flags(*saving))
    stock, ours = gone_on(job, tmp_path, flags("--load", str(tmp_path / "saved")), 4)
    assert samples(ours) == samples(stock) == [{*range(k, k + 8)} for k in range(24, 8 + 8 * 38, 8)]
    assert_same_weights(ours, stock)


@pytest.mark.parametrize("form", [TORCH, ()], ids=("torch", "torch_dist"))
def test_who_comes_back_to_a_job_that_began_from_a_pretrained_checkpoint(
    job: Jobs, tmp_path: Path, form: tuple[str, ...]
) -> None:
    job(gpt(1, 2, *form, "--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3"))
    begun = gpt(
        1, 2, *LONG, *form, "--load", str(tmp_path / "none"), "--pretrained-checkpoint", str(tmp_path / "saved")
    )
    stock, ours = gone_on(job, tmp_path, begun, 0)
    assert samples(ours) == samples(stock)
    assert_same_weights(ours, stock)


def test_a_job_whose_steps_are_all_in_the_checkpoint_evaluates_as_stock(job: Jobs, tmp_path: Path) -> None:
    saving = *TORCH, "--save", str(tmp_path / "saved"), "--save-interval", "6"
    job(gpt(1, 2, *saving))
    loading = gpt(1, 2, *TORCH, *EVALUATES, "--load", str(tmp_path / "saved"))
    stock, ours = job(loading), job(loading, {})
    assert evaluations(ours) == pytest.approx(evaluations(stock), abs=5e-6) and len(evaluations(ours)) == 2


@pytest.mark.parametrize(
    "more", [("--no-load-optim",), ("--finetune",), ("--override-ckpt-iteration", "0")], ids=" ".join
)
def test_a_distributed_optimizer_takes_from_a_checkpoint_what_stocks_takes(
    job: Jobs, tmp_path: Path, more: tuple[str, ...]
) -> None:
    of_all = "--bf16", "--clip-grad", "0", "--use-distributed-optimizer"
    job(gpt(1, 2, *of_all, "--save", str(tmp_path / "saved"), "--save-interval", "3", "--exit-interval", "3"))
    loading = gpt(1, 2, *of_all, "--load", str(tmp_path / "saved"), *more)
    stock, ours = job(loading), job(loading, {"exact": True})
    assert samples(ours) == samples(stock)
    assert_same_weights(ours, stock)
