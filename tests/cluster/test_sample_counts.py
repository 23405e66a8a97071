"""Each sample is used exactly once per committed step, proved by the weights (see tests/jobs/count.py)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.jobs import COUNT

pytestmark = pytest.mark.plain_too

SHARE = 4  # replicas × micro-batches
SAMPLES_PER_STEP = 8
STEPS = 12


@pytest.fixture
def counts(launch, tmp_path):
    """``counts(*faults, wrap=)``: for each rank that got to the end, how often each sample was used."""

    def run(*faults: str, **wrap: object) -> dict[str, torch.Tensor]:
        job = {"folder": str(tmp_path / "run0"), "faults": faults, "steps": STEPS, "wrap": wrap}
        launch(script=COUNT, RECYCLE_TEST_COUNT=json.dumps(job)).ended_well()
        paths = sorted((tmp_path / "run0" / "rows").iterdir())
        return {path.stem: -SHARE * torch.load(path).flatten() for path in paths}

    return run


@pytest.mark.parametrize(
    "kills", [(), ("kill 0.1 before 1F0.1@4", "kill 1.0 after 0REDUCE@9"), ("kill 1.1 after 1STEP@7",)], ids=" ".join
)
def test_every_sample_counts_once(counts, kills):
    found = counts(*kills)
    assert len(found) == 4 - len(kills)
    for rank, used in found.items():
        assert torch.equal(used, torch.ones(SAMPLES_PER_STEP * STEPS)), f"{rank}: {used.tolist()}"


@pytest.mark.plain_too(deepspeed=False)
def test_an_interrupted_sum_leaves_the_contributions_as_they_were(counts):
    """Whoever had the sum is dead, so it is made again; stage 0's only gradient is a bucket of its own, which
    flattening does not copy.
    """
    found = counts("kill 1.0 before 0STEP@5", name="lose_result", seats=["0.0"], reduce="0REDUCE@5")
    assert len(found) == 3
    for rank, used in found.items():
        assert torch.equal(used, torch.ones(SAMPLES_PER_STEP * STEPS)), f"{rank}: {used.tolist()}"


@pytest.mark.plain_too(deepspeed=False)
@pytest.mark.parametrize("times", (0, 2))
def test_a_sample_left_out_or_used_twice_would_be_seen(counts, times):
    found = counts("kill 0.1 before 1F0.1@4", name="scale_micro_batch", micro_batch="0.1", step=4, factor=times)
    for used in found.values():
        wrong = (used != 1).nonzero().flatten().tolist()
        # step 4's samples are 24 to 31; replica 0 has the even ones, its second micro-batch the last two
        assert wrong == [28, 30]
        assert used[wrong].tolist() == [times, times]
