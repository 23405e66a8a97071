"""What torch's ``Work`` objects say of operations that have failed."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.handles import BaseWork, Finished, PartOfWork, Together

FAILED = RecycleError("nobody carries it")


class Failed(BaseWork):
    """An operation that has ended with an error."""

    def wait(self, timeout: object = None) -> bool:
        raise FAILED

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return FAILED


def test_a_part_of_what_has_failed_has_failed_too():
    taken = []
    part = PartOfWork(Failed(), torch.zeros(1), lambda: taken.append(1))
    assert part.is_completed() and not part.is_success() and part.exception() is FAILED and not taken
    with pytest.raises(RecycleError, match="nobody carries it"):
        part.wait()


def test_several_have_failed_if_one_has():
    both = Together([Finished(), Failed()])
    assert both.is_completed() and not both.is_success() and both.exception() is FAILED
    assert Together([Finished()]).is_success() and Together([Finished()]).exception() is None
