"""SIGKILL from outside of the process at uniformly random times of the training; seeded.

The job does not end before the last of them.
"""

from __future__ import annotations

import pytest

from tests.support.jobs import assert_same_training
from tests.support.kills import kill_all, named, schedules

pytestmark = pytest.mark.plain_too


@pytest.mark.some_of(2)
@pytest.mark.parametrize("kills", [pytest.param(kills, id=named(kills)) for kills in schedules()])
def test_kills_from_outside(launch, reference, tmp_path, kills):
    result = kill_all(launch, tmp_path / "gate", kills)
    lost = {seat for _, seats in kills for seat in seats}
    assert_same_training(result, reference(), lost)


def test_there_are_twenty_kills():
    assert sum(len(seats) for kills in schedules() for _, seats in kills) == 20
