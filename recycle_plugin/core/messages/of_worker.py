"""What messages that concern one worker have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from recycle_plugin.core.messages.said import ToCoordinator
from recycle_plugin.core.vocabulary.roster import WorkerId


@dataclass(frozen=True)
class OfWorker(ToCoordinator):
    """A message from a worker, or about one: process ``incarnation`` of ``rank``."""

    rank: int
    incarnation: int = field(default=0, kw_only=True)

    @cached_property  # everything that looks at a message asks for it
    def worker(self) -> WorkerId:
        """The identity of the worker."""
        return WorkerId(self.rank, self.incarnation)
