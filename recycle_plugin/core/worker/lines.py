"""What most parts of a worker need of their machine; generators as in core.worker.machine.Machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.core.worker.executor import Waits
from recycle_plugin.core.worker.shares import Word

T = TypeVar("T")


class CoordinatorLine(Protocol):
    """A worker's line to the coordinator."""

    @property
    def control_view(self) -> ControlView:
        """What this worker knows of the control plane."""

    def send(self, message: object) -> None:
        """Send ``message`` to the coordinator."""


class WaitingLine(CoordinatorLine, Protocol):
    """The same, and how a worker waits."""

    def wait(
        self,
        what: Callable[[], str] | str,
        ready: Callable[[], T | None],
        interruptible: bool = True,
        at_least_s: float = 0.0,
    ) -> Waits[T]:
        """Yield until ``ready()`` is not None, the value. ``what``: what it waits for, in words; ``at_least_s``: the
        least deadline, in seconds. Raises Interrupted or JobEnded as ``ControlView.check`` does; if not
        ``interruptible``, only JobEnded.
        """


class ReplayWords(Protocol):
    """How workers talk of replays to each other (core/worker/shares.py)."""

    def words(self) -> list[Word]:
        """Return what this worker was told of replays since the last call."""

    def tell(self, address: str, word: Word) -> None:
        """Send a word about a replay to the worker at ``address``, which may be gone."""
