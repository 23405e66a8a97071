"""A second adapter: a framework with gradient buffers and an optimizer of its own survives losses and returns, and
trains what it trains without.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.jobs import PLAIN, assert_same_training, difference, faults
from tests.support.launching import Launch
from tests.support.returns import LONG, assert_came_back, comes_back


@pytest.fixture
def vehicle():
    return replace(PLAIN, name="toy", script="tests/jobs/toy.py", wrapped="tests/jobs/toy.py", others={})


@pytest.mark.parametrize(
    "kill, more",
    [
        ("kill 1.1 before 1W1.0@5", ()),
        ("kill 0.0 after 0I0.1@5", ("gradient_clipping=0.05",)),
        ("kill 1.0 before 0REDUCE@5", ("recycle.exact=true", "recycle.check_replicas=1")),
        ("kill 0.1 after 1STEP@5", ("gradient_clipping=0.05", "recycle.clip=validate")),
    ],
)
def test_a_loss_leaves_what_is_trained(launch: Launch, reference, kill, more):
    result = launch(faults(kill), *more).finish()
    whole = reference(*more)
    found = assert_same_training(result, whole, lost={kill.split()[1]})
    assert len(set(whole.losses)) > 15 and whole.losses[-1] < whole.losses[0]
    if "recycle.exact=true" in more:
        assert found.none


def test_who_comes_back_trains_on_with_the_others(launch: Launch, reference, tmp_path):
    result = comes_back(launch, tmp_path, "kill 1.1 before 1I1.0@5").finish()
    assert_came_back(result, reference(f"steps={LONG}"), "1.1")


def test_a_checkpoint_that_a_degraded_job_saves_goes_on_as_if_nothing_was(launch: Launch, reference):
    first = launch("steps=8", "save_at=[8]", faults("kill 0.0 before 0F0.1@5")).ended_well()
    (saved,) = (first.folder / "saved").glob("global_step8")
    assert {path.name for path in saved.iterdir()} == {"toy0", "toy1"}
    second, whole = launch(f"load={saved}").finish(), reference()
    later = {rank: {**each, "losses": each["losses"][8:]} for rank, each in whole.records.items()}
    assert difference(second, replace(whole, records=later)).tolerated
