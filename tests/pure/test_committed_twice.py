"""The check of every real job that no step is committed twice."""

from __future__ import annotations

import pytest

from tests.support.cluster import committed_twice


def events(*kinds: float | str) -> list[dict]:
    """Numbers: steps, which took other times each time; fractions took the same."""
    return [
        {"event": "committed", "step": int(kind), "time": time, "step_s": kind if isinstance(kind, float) else time}
        if isinstance(kind, int | float)
        else {"event": kind, "step": 0}
        for time, kind in enumerate(kinds)
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
        ((1, 2.5, "coordinator", 2.5, 3), []),
        ((1, 2.5, "coordinator", 3, 2.5), []),
        ((1, 2.5, "coordinator", 2.25, 3), [2]),
    ],
)
def test_two_that_commit_are_seen(said, found):
    assert committed_twice(events(*said)) == found
