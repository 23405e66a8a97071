"""What a worker's training script is at, and the hooks that run at its turning points."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recycle_plugin.errors import RecycleError, Refused

if TYPE_CHECKING:  # it imports torch, which the script may do later
    from torch.distributed import ProcessGroup


@dataclass
class ScriptHooks:
    """What the parts of a worker tell each other about its script.

    * ``trains``: this process has its trainer. ``pushed``: its script pushes micro-batches (core/worker/pushed.py), so
      a newcomer is at the others' step only once it is given work. ``passes``: its script goes through steps that are
      over (adapters/hugging_face/passing.py).
    * ``between_steps`` recovers from a membership change that reaches the script outside a step, in its own collective.
    * ``through`` is called when the script is through: the process then leaves once nobody needs this worker.
      ``at_end`` is called at that time, or at the job's planned end.
    * ``startup``: the results of the predecessor's collectives before its first step, for a newcomer (Startup in
      runtime/collectives, a higher layer), once there are groups. ``seat_group``: the group of the workers that share
      this seat, None if this worker holds it alone. ``place``: this worker's place among the seats (HeldSeat in
      runtime/collectives), if the script has asked for it before it trains.
    * ``refused``: the first thing that a newcomer's script was refused, None if nothing was.
    """

    trains: bool = False
    pushed: bool = False
    passes: bool = False
    between_steps: Callable[[], None] | None = None
    through: Callable[[], None] = lambda: None
    at_end: Callable[[], None] = lambda: None
    startup: Any = None
    seat_group: ProcessGroup | None = None
    place: Any = None
    refused: str | None = None

    def refusal(self, text: str) -> RecycleError:
        """Return the error to raise in a newcomer's script that asks for what it can't have."""
        self.refused = self.refused or text
        return RecycleError(text)

    def check_not_refused(self) -> None:
        """Raise Refused if the newcomer's script has gone on after a refusal."""
        if self.refused is not None:
            raise Refused(f"{self.refused}; the script has caught this error")


class TrainingThread:
    """The thread that trains, known by its ``ident`` once it has begun. ``work``: the part of a program that it carries
    out, None between steps. ``backward``: whether it is in a backward that the script runs
    (runtime/collectives/callers.py).

    ``idle(waiting=True)`` is called while the thread waits. It serves newcomers and returns whether there was anything
    to do, None if there are no newcomers.
    """

    def __init__(self) -> None:
        self.ident: int | None = None
        self.work: object | None = None
        self.backward = False
        self.idle: Callable[..., bool | None] = lambda waiting: None

    @property
    def is_current(self) -> bool:
        """Whether this thread is the calling one."""
        return self.ident == threading.get_ident()

    def serve_newcomers(self) -> bool | None:
        """Serve newcomers, on the training thread. Return whether there was something to do, None without newcomers."""
        return self.idle(waiting=True) if self.is_current else None

    @contextmanager
    def at_work(self, work: object) -> Iterator[None]:
        """Record that this thread, which trains, carries out ``work`` of a program inside this context."""
        before = self.turn_to(work)
        try:
            yield
        finally:
            self.work = before

    def turn_to(self, work: object) -> object:
        """Record that this thread, which trains, carries out ``work`` from now on. Return what it did before."""
        before, self.work, self.ident = self.work, work, threading.get_ident()
        return before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Record that the thread is in a backward of the script inside this context."""
        self.backward = True
        try:
            yield
        finally:
            self.backward = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A context in which newcomers are not served while the thread waits: the state is between two steps."""
        idle, self.idle = self.idle, lambda waiting: None
        try:
            yield
        finally:
            self.idle = idle
