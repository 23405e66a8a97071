"""A worker's access to the store at the coordinator (core/coordinator/facts/key_values.py)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from recycle_plugin.core.messages.encoding import MOST
from recycle_plugin.core.messages.from_coordinator import StoreAnswer
from recycle_plugin.core.messages.from_workers import StoreCall
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.control.waiting import Waiting

LOOK_S = 1.0  # s between checks that the job has not ended


class StoreAccess:
    """The store for the worker with this ``view`` of the job. Any thread may call any method.
    ``used_by``: kept alive with it.
    """

    def __init__(self, view: ControlView, send: Callable[[object], None], waiting: Waiting) -> None:
        self._view, self._send, self._waiting = view, send, waiting
        self.used_by: list[object] = []
        self._numbers = itertools.count()
        self._answers: dict[int, StoreAnswer | None] = {}  # by number of a call that waits

    def call(
        self, call: str, keys: Sequence[str], values: Sequence[bytes] = (), timeout_s: float = 0.0
    ) -> tuple[bytes, ...]:
        """Have the coordinator do this and return its answer. Raises WaitTimeout, which names ``keys``, after
        ``timeout_s`` (default: the worker's) and once the job has ended; RecycleError if the coordinator says why not.
        """
        if len(keys) > MOST:
            raise RecycleError(f"the store can't {call} {len(keys)} keys at a time: at most {MOST}")
        number, waiting = next(self._numbers), self._waiting
        with waiting.changed:
            self._answers[number] = None
        try:
            self._send(StoreCall(self._view.rank, number, call, tuple(keys), tuple(values)))
            answer = self._answer(number, call, keys, timeout_s or waiting.timeout_s)
        except ValueError as error:  # as it is encoded
            raise RecycleError(f"the store can't {call} {_named(keys)}: {error}") from None
        finally:
            with waiting.changed:
                del self._answers[number]
        if answer.why_not:
            raise RecycleError(f"the store can't {call} {_named(keys)}: {answer.why_not}")
        return answer.values

    def take(self, answer: StoreAnswer) -> None:
        """Handle an answer of the coordinator."""
        with self._waiting.changed:
            if answer.number in self._answers:
                self._answers[answer.number] = answer
                self._waiting.changed.notify_all()

    def _answer(self, number: int, call: str, keys: Sequence[str], timeout_s: float) -> StoreAnswer:
        deadline = time.monotonic() + timeout_s
        with self._waiting.changed:
            while (answer := self._answers[number]) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or (self._view.end is not None and not self._view.end.step):
                    break
                self._waiting.changed.wait(min(left_s, LOOK_S))
            else:
                return answer
        if left_s > 0:
            raise WaitTimeout(f"the job has ended while {self._view} waited for the store's {_named(keys)}")
        if call == "wait":
            self._send(StoreCall(self._view.rank, number, "wait_no_more", tuple(keys), ()))
            raise WaitTimeout(f"{self._view} waited {timeout_s:g} s for {_named(keys)}, which nobody has set")
        raise WaitTimeout(f"{self._view} waited {timeout_s:g} s for the coordinator to {call} {_named(keys)}")


def _named(keys: Sequence[str]) -> str:
    return f"key {keys[0][:80]!r}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}" if keys else "its keys"
