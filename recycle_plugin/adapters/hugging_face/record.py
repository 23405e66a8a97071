"""The results of a loop's calls of Accelerate between its steps, kept for the scripts of replicas that rejoin. All live
ranks get the same result of each such call, and keep it. A newcomer's script repeats the calls alone, and gets the kept
results.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import operations

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.callers import calling_line

MOST = 64 << 20  # bytes that are kept at most
EACH_CALL = 500  # bytes, besides its tensors
ADVICE = "let the script make the same Accelerate calls in each process, whatever has happened before its start"


@dataclass(frozen=True)
class Call:
    """The result ``value`` of the call ``name`` after ``step`` steps; ``before``, ``live``: the live ranks as known
    before and after it.
    """

    name: str
    step: int
    value: Any
    before: tuple[int, ...]
    live: tuple[int, ...]


@dataclass
class Record:
    """The record of a loop. ``losses``: the mean loss of each of the ``steps`` that are over; the last loss follows
    when the next step begins. ``calls``: the calls between these steps, in order, of ``size`` bytes.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    size: int = 0

    @property
    def full(self) -> bool:
        """Whether the calls exceed the limit, so that no newcomer's script can repeat them."""
        return self.size > MOST

    def add(self, name: str, value: Any, before: tuple[int, ...], live: tuple[int, ...]) -> None:
        """Keep the result of the call ``name``."""
        if self.full:
            return
        sizes: list[int] = []
        kept = operations.recursively_apply(lambda each: _copy(each, sizes), value)
        self.size += EACH_CALL + sum(sizes) + (sys.getsizeof(value) if not sizes else 0)
        self.calls.append(Call(name, self.steps, kept, before, live))
        if self.full:
            self.calls.clear()


class Replay:
    """The calls of a ``record`` once more, for a script that goes through the steps that are over."""

    def __init__(self, record: Record) -> None:
        self.losses, self._calls = record.losses, deque(record.calls)
        self.step = 0  # steps that are over in the script

    @property
    def over(self) -> bool:
        """Whether the script has been through all steps that are over."""
        return self.step == len(self.losses)

    def live_before(self, live: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks that were live before the next call: others than ``live`` if calls that no newcomer repeats
        have found a loss.
        """
        return self._calls[0].before if self._calls else live

    def next(self, name: str) -> Call:
        """Return the next kept call. Raises RecycleError if the script's next call ``name`` is another."""
        kept = self._calls[0] if self._calls else None
        if kept is None or (kept.name, kept.step) != (name, self.step):
            then = "no call" if kept is None else f"{kept.name}, after step {kept.step}"
            raise RecycleError(
                f"Accelerate's {name}, called at {calling_line()} after step {self.step}, where the others have made "
                f"{then}: a replica that comes back can't get its result; {ADVICE}"
            )
        return self._calls.popleft()

    def end(self) -> None:
        """Raise RecycleError if the script has left out a call."""
        if self._calls:
            left = self._calls[0]
            raise RecycleError(
                f"the script of a replica that comes back has left out {left.name} after step {left.step}, which the "
                f"others have called: {ADVICE}"
            )


def _copy(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    sizes.append(tensor.nbytes)
    return tensor.detach().cpu().clone()
