"""Steps that are judged after they have been applied: when one is rejected, who has to hear of it, and what counts
meanwhile.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.facts.step_validation import StepValidation, over
from recycle_plugin.core.messages.contributions import LOSS, MEAN, NORM, SHARE
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import Collected, Committed, End, Generation, Resume
from recycle_plugin.core.messages.from_workers import Contribution, Exited, SurvivorReport
from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.packed_data import pack
from recycle_plugin.core.vocabulary.recovery_plan import uninformed
from tests.support.membership import said, started, step

LIMIT = 2.0


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=5), st.floats(1e-3, 1e15))
def test_a_step_is_rejected_where_waiting_for_its_norm_would_have_clipped_it(shares, limit):
    validation = StepValidation(len(shares), limit)
    found = [validation.add(1, {str(stage): share}) for stage, share in enumerate(shares)]
    norm = math.sqrt(math.fsum(shares))
    assert found[:-1] == [None] * (len(shares) - 1)
    assert found[-1] == (norm if min(1.0, limit / (norm + 1e-6)) < 1 else None)
    assert (validation.judged, validation.rejected) == (1, found[-1] is not None)


@pytest.mark.parametrize("norm", (math.inf, math.nan))
def test_what_is_not_finite_is_over_every_limit(norm):
    assert over(norm, 0.0) and over(norm, 1e30) and not over(1e30, 0.0)


def test_the_first_norm_stays():
    """A stage whose sum is made again after a failure may find another last digit."""
    validation = StepValidation(1, LIMIT)
    assert validation.add(1, {"0": 9.0}) == 3.0 and validation.add(1, {"0": 9.1}) is None
    assert validation.rejection(1) == 3.0 and validation.judged == 1
    validation.committed(1)
    assert validation.rejection(1) is None


# --- what the coordinator makes of it -----------------------------------------------------------------


def validating(**more: object):
    return started(clipping=LIMIT, clip="validate", **more)


def share(membership, rank: int, number: int, value: float) -> CoordinatorOutput:
    return membership.receive(Contribution(rank, number, SHARE, {str(rank // 2): value}, 2), 0.0)


def reported(membership, stepped: dict[int, int], informed: dict[int, int]) -> CoordinatorOutput:
    """All of ``stepped`` report: the steps they have applied, and the last one whose norm they know."""
    for rank, count in stepped.items():
        stage = rank // 2
        held = {Datum("params", stage, None, count + 1)} | {
            Datum("norm", stage, None, number) for number in range(1, informed.get(rank, 0) + 1)
        }
        out = membership.receive(SurvivorReport(rank, membership.generation, count, "plan", pack(held)), 0.0)
    return out


def test_a_step_below_the_limit_is_committed_as_if_nobody_had_asked():
    membership = validating()
    for rank in range(4):
        assert not share(membership, rank, 1, 1.0).messages
    assert step(membership, 0, 1) == [Committed(1)]


def test_a_rejected_step_is_heard_of_by_everybody_and_not_committed_before_it_is_applied_again():
    membership = validating()
    assert not share(membership, 0, 1, 5.0).messages
    out = share(membership, 2, 1, 4.0)
    (generation,) = said(out, Generation)
    assert [member.rank for member in generation.members] == [0, 1, 2, 3] and generation.from_step == 0
    assert "gradient norm is 3 (1 of 1 steps so far)" in out.events[0].text
    assert step(membership, 1, 1) == []
    (resume,) = said(reported(membership, dict.fromkeys(range(4), 1), {}), Resume)
    assert (resume.committed, resume.norm, resume.rejected) == (0, 3.0, True)
    assert step(membership, 1, 1) == [Committed(1)]


@pytest.mark.parametrize(
    "informed, committed, rejected", (({}, 0, True), ({0: 1, 1: 1, 3: 1}, 1, False), ({0: 1, 1: 1}, 0, True))
)
def test_a_failure_after_a_rejection_asks_who_has_heard_of_it(informed, committed, rejected):
    membership = validating()
    share(membership, 0, 1, 5.0)
    share(membership, 2, 1, 4.0)
    assert said(membership.receive(Exited(2, -9, 0.0), 0.0), Generation)
    (resume,) = said(reported(membership, {0: 1, 1: 1, 3: 1}, informed), Resume)
    assert (resume.committed, resume.rejected) == (committed, rejected)
    assert resume.norm == (None if committed else 3.0)


def test_losses_of_steps_after_a_rejected_one_are_computed_again():
    membership = validating()
    membership.receive(Contribution(2, 2, LOSS, {"0.0": 7.0}, 2), 0.0)
    share(membership, 0, 1, 5.0)
    share(membership, 2, 1, 4.0)
    reported(membership, dict.fromkeys(range(4), 1), {})
    assert not said(membership.receive(Contribution(3, 2, LOSS, {"1.0": 1.0}, 2), 0.0), Collected)
    collected = said(membership.receive(Contribution(2, 2, LOSS, {"0.0": 2.0}, 2), 0.0), Collected)
    assert [one.values for one in collected] == [{MEAN: 1.5}]


@pytest.mark.parametrize("name", (SHARE, NORM))
def test_a_norm_that_is_not_finite_ends_the_job_unless_such_steps_are_to_be_skipped(name):
    for nonfinite in ("end", "skip"):
        membership = validating(nonfinite=nonfinite)
        for rank, value in ((0, math.nan), (2, 1.0)):
            out = membership.receive(Contribution(rank, 1, name, {str(rank // 2): value}, 2), 0.0)
        ends = said(out, End)
        assert bool(ends) == (nonfinite == "end")
        if ends:
            assert ends[0].failed and "the gradient norm of step 1 is nan" in ends[0].reason
            assert 'recycle.nonfinite to "skip"' in ends[0].reason


def test_norms_that_are_not_finite_travel():
    resume = Resume(1, 0, {}, math.inf, True)
    assert decode(encode(resume)) == resume


def test_who_is_uninformed():
    held = {
        Seat(0, 0): {Datum("norm", 0, None, 3)},
        Seat(0, 1): {Datum("norm", 1, None, 2), Datum("params", 1, None, 4)},
    }
    assert uninformed(held, 3) == {Seat(0, 1)}


def test_a_share_that_is_said_again_and_is_not_finite_any_more_rejects_a_step_that_was_to_stay():
    validation = StepValidation(2, limit=10.0, skips=True)
    assert validation.add(4, {"0": 9.0}) is None and validation.add(4, {"1": 16.0}) is None
    assert validation.add(4, {"0": 9.5}) is None and validation.rejection(4) is None and validation.rejected == 0
    assert validation.add(4, {"0": math.inf}) == math.inf == validation.rejection(4)
    assert validation.add(4, {"0": math.inf}) is None and (validation.judged, validation.rejected) == (1, 1)
