"""What messages that concern one worker have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from recycle_plugin.core.messages.said import ToCoordinator
from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass(frozen=True)
class OfWorker(ToCoordinator):
    """A message from a worker, or about it: ``rank`` and ``incarnation`` say which of the processes that have had its
    rank is meant.
    """

    rank: int
    incarnation: int = field(default=0, kw_only=True)

    @cached_property  # all that look at a message ask for it
    def worker(self) -> WorkerId:
        """The identity of the process that is meant."""
        return WorkerId(self.rank, self.incarnation)
