"""Groups on the stand-in accelerator, over the false NCCL (tests/support/standin/nccl.py): each member is a process."""

from __future__ import annotations

import pytest

from tests.support import standin_build


@pytest.fixture(scope="session", autouse=True)
def standin() -> None:
    """The stand-in's native part, built: members only load it."""
    standin_build.built()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the first test the time to build."""
    item.add_marker(pytest.mark.timeout(standin_build.BUILD_S + 200))
