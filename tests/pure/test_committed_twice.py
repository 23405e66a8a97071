"""The check of every real job that no step is committed twice."""

from __future__ import annotations

import pytest

from tests.support.cluster import committed_twice


def events(*kinds: int | str) -> list[dict]:
    return [
        {"event": "committed", "step": kind} if isinstance(kind, int) else {"event": kind, "step": 0} for kind in kinds
    ]


@pytest.mark.parametrize(
    "said, found",
    [
        (("start", 1, 2, 3), []),
        ((1, 2, "coordinator", 3, 4), []),
        ((1, 2, 3, "coordinator", 3, 4), [3]),
        ((1, 2, 3, 2, 3, 4), [2, 3]),
        ((1, 2, "loaded", 1, 2), []),
        ((1, 2, "start", 1), []),
    ],
)
def test_two_that_commit_are_seen(said, found):
    assert committed_twice(events(*said)) == found
