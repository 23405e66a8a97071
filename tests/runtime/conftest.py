"""A coordinator that the test plays itself, for one worker's session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.coordinator import FakeCoordinator

if TYPE_CHECKING:
    from tests.support.scenario import Job


@pytest.fixture
def coordinator():
    fake = FakeCoordinator()
    yield fake
    fake.close()


@pytest.fixture
def job() -> Iterator[Job]:
    """Of three ranks, each in a process, whose coordinator is the test."""
    from tests.support.scenario import Job  # which most tests here do without

    made = Job()
    try:
        yield made
    finally:
        made.end()
