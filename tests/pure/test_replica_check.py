"""Hashes of replicas, compared when their step is committed."""

from __future__ import annotations

import pytest

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import End, Fence, Generation, Resume
from recycle_plugin.core.messages.from_workers import Exited, Fingerprint, Stepped
from recycle_plugin.core.vocabulary.roster import WorkerId
from tests.support.membership import agree, said, started


def stepped(membership: Membership, step: int, digests: str) -> list[CoordinatorOutput]:
    outs = []
    for rank, digest in enumerate(digests):
        if WorkerId(rank) not in membership.lost:
            if digest != "-":
                outs.append(membership.receive(Fingerprint(rank, step, digest), 0.0))
            outs.append(membership.receive(Stepped(rank, membership.generation, step), 0.0))
    return outs


def all_said(outs: list[CoordinatorOutput], kind: type) -> list:
    return [one for out in outs for one in said(out, kind)]


@pytest.mark.parametrize("digests", ["aabb", "----"])
def test_equal_replicas_of_each_stage_are_right(digests):
    outs = stepped(started(), 1, digests)
    assert not all_said(outs, End) and not all_said(outs, Fence)


def test_of_two_that_differ_both_are_named_and_the_job_ends():
    (end,) = all_said(stepped(started(), 1, "aabc"), End)
    assert end.failed
    assert end.reason.startswith(
        "the replicas at seat 0.1 (rank 2), seat 1.1 (rank 3) differ after step 1, and no majority says which is right"
    )


@pytest.mark.parametrize(("digests", "wrong"), [("aaba", [2]), ("baaa", [0]), ("aaab", [3])])
def test_a_majority_gives_up_who_differs(digests, wrong):
    membership = started(replicas=4, stages=1)
    outs = stepped(membership, 1, digests)
    assert sorted({one.rank for one in all_said(outs, Fence)}) == wrong and not all_said(outs, End)
    (generation,) = all_said(outs, Generation)
    assert [member.rank for member in generation.members] == [rank for rank in range(4) if rank not in wrong]
    assert said(agree(membership, generation.number, {member.rank: 1 for member in generation.members}), Resume)


@pytest.mark.parametrize("digests", ["aabb", "aabc", "abcd"])
def test_half_is_no_majority(digests):
    (end,) = all_said(stepped(started(replicas=4, stages=1), 1, digests), End)
    assert end.failed and "differ after step 1" in end.reason


def test_a_step_that_is_applied_again_is_hashed_again():
    membership = started()
    membership.receive(Fingerprint(0, 1, "before the failure"), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    agree(membership, 1, {0: 0, 1: 0, 3: 0})
    assert not all_said(stepped(membership, 1, "aa-b"), End) and membership.committed == 1


def test_steps_that_a_regrouping_commits_are_compared_too():
    membership = started()
    for rank, digest in enumerate("abcc"):
        membership.receive(Fingerprint(rank, 1, digest), 0.0)
    membership.receive(Exited(2, -9, 0.0), 0.0)
    (end,) = said(agree(membership, 1, {0: 1, 1: 1, 3: 1}), End)
    assert "the replicas at seat 0.0 (rank 0), seat 1.0 (rank 1) differ" in end.reason


def test_nothing_is_compared_until_all_who_live_have_said_it():
    """As of a checkpoint that training begins with: of the first two nobody would know which is right."""
    membership = started(replicas=4, stages=1)
    outs = [membership.receive(Fingerprint(rank, 0, digest), 0.0) for rank, digest in ((0, "a"), (1, "b"))]
    outs += [membership.receive(Stepped(0, 0, 1), 0.0)]
    outs += [membership.receive(Fingerprint(rank, 0, "a"), 0.0) for rank in (2, 3)]
    assert not all_said(outs, End) and not all_said(outs, Fence)
    assert {one.rank for one in said(membership.receive(Stepped(2, 0, 1), 0.0), Fence)} == {1}


def test_a_dead_worker_does_not_vote():
    membership = started(replicas=4, stages=1)
    for rank, digest in enumerate("aabb"):
        membership.receive(Fingerprint(rank, 1, digest), 0.0)
    membership.receive(Exited(3, -9, 0.0), 0.0)
    out = agree(membership, 1, {0: 1, 1: 1, 2: 1})
    assert not said(out, End) and {one.rank for one in said(out, Fence)} == {2}


def test_the_message_survives_the_wire():
    assert decode(encode(Fingerprint(1, 2, "ab"))) == Fingerprint(1, 2, "ab")


# --- copies of a weight that stages share ---------------------------------------------------------------


def said_of_tied(membership: Membership, step: int, digests: str, copies: str) -> list[CoordinatorOutput]:
    """Each rank's state, and its copy of the one weight that both stages have."""
    outs = []
    for rank, (digest, copy) in enumerate(zip(digests, copies)):
        outs.append(membership.receive(Fingerprint(rank, step, digest, {"embedding.weight": copy}), 0.0))
        outs.append(membership.receive(Stepped(rank, membership.generation, step), 0.0))
    return outs


def test_copies_on_all_stages_are_one_vote_each():
    """Two replicas of a stage that differ are no majority; with the other stage's copies there is one."""
    membership = started()
    outs = said_of_tied(membership, 1, "aabc", "xxxy")
    assert [one.rank for one in all_said(outs, Fence)][:1] == [3] and not all_said(outs, End)
    assert {member.rank for member in all_said(outs, Generation)[-1].members} == {0, 1, 2}


def test_copies_that_differ_between_stages_end_the_job_although_each_stage_is_of_one_mind():
    (end,) = all_said(said_of_tied(started(), 1, "aabb", "xxyy"), End)
    assert end.failed
    assert end.reason.startswith(
        "the copies of embedding.weight at seat 0.0 (rank 0), seat 0.1 (rank 2), seat 1.0 (rank 1), seat 1.1 (rank 3) "
        "differ after step 1, and no majority says which is right"
    )


def test_equal_copies_are_right():
    outs = said_of_tied(started(), 1, "aabb", "xxxx")
    assert not all_said(outs, End) and not all_said(outs, Fence)
