"""The coordinator's state machine: connections between live workers that break."""

from __future__ import annotations

import pytest

from recycle_plugin.core.membership import Membership
from recycle_plugin.core.output import Output
from recycle_plugin.core.protocol import End, Fence, Generation, Missing
from tests.support.membership import agree, said, started, step


def fails(membership: Membership, generation: int, source: str) -> Output:
    """Seat 1.0 says so; where all meet again, they do."""
    out = membership.receive(Missing(1, generation, "what it waits for", source), 0.0)
    if said(out, Generation):
        agree(membership, generation + 1, dict.fromkeys(range(4), membership.committed))
    return out


@pytest.mark.parametrize("source", ["0.0", ""], ids=["tensor", "collective"])
def test_all_meet_again_where_a_connection_breaks_and_each_commit_gives_new_tries(source):
    membership = started()
    for generation in range(6):
        (met,) = said(fails(membership, generation, source), Generation)
        assert len(met.members) == 4 and membership.lost == set()
        if generation % 2:
            step(membership, generation + 1, membership.committed + 1)
    assert not fails(membership, 3, source).messages, "an older membership's connection is nobody's business"
    assert not fails(membership, 6, "2.0").messages, "nor is that to a worker which is none"


@pytest.mark.parametrize("source, lost", [("0.0", {0}), ("", set())], ids=["tensor", "collective"])
def test_where_that_does_not_help_the_one_that_is_not_heard_goes_and_the_job_ends_where_nobody_knows_which(source, lost):
    membership = started()
    for generation in range(2):
        fails(membership, generation, source)
    out = membership.receive(Missing(1, 2, "what it waits for", source), 0.0)
    assert {worker.rank for worker in membership.lost} == lost and {fence.rank for fence in said(out, Fence)} == lost
    reasons = [end.reason.partition(" between")[0] for end in said(out, End)]
    assert reasons == ([] if lost else ["seat 1.0 (rank 1) could not finish what it waits for, 3 times, and nobody in it is lost: see to the network"])
