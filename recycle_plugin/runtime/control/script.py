"""What a worker's training script is at, and what is called at its turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes torch, which the script imports when it likes
    from torch.distributed import ProcessGroup


@dataclass
class ScriptHooks:
    """What the parts of a worker tell each other of its script.

    * ``trains``: this process has its trainer; ``pushed``: its script pushes micro-batches (core/worker/pushed.py), so
      that one which comes back is at the others' step only once it is given work.
    * ``between_steps`` recovers from a membership change that the script meets outside a step, in a collective of its
      own.
    * ``through`` is called when the script is through, to go when nobody needs this worker, and ``at_end`` then, or
      when the job has come to its planned end.
    * ``startup``: what a newcomer's predecessor's collectives gave before its first step (collectives' Startup, which
      stands above), once there are groups; ``seat_group``: of the workers that hold this one's seat with it, None where
      it does so alone; ``place``: this worker's among the seats (collectives' HeldSeat), where the script has asked
      for it before it trains.
    """

    trains: bool = False
    pushed: bool = False
    between_steps: Callable[[], None] | None = None
    through: Callable[[], None] = lambda: None
    at_end: Callable[[], None] = lambda: None
    startup: Any = None
    seat_group: ProcessGroup | None = None
    place: Any = None


class TrainingThread:
    """The thread that trains, by its ``ident`` once it has begun: ``work`` is what of a program it carries out, None
    between steps, and ``backward`` whether a script's own is what it runs (runtime/collectives/callers.py).

    ``idle(waiting=True)`` is called while it waits: it serves newcomers, and returns whether there was anything to do,
    None where there are none.
    """

    def __init__(self) -> None:
        self.ident: int | None = None
        self.work: object | None = None
        self.backward = False
        self.idle: Callable[..., bool | None] = lambda waiting: None

    @property
    def is_current(self) -> bool:
        """Whether it is the thread that asks."""
        return self.ident == threading.get_ident()

    def serve_newcomers(self) -> bool | None:
        """Do what newcomers ask for, since the thread that trains waits anyway; whether there was something to do now,
        None where nobody asks for anything.
        """
        return self.idle(waiting=True) if self.is_current else None

    @contextmanager
    def at_work(self, work: object) -> Iterator[None]:
        """Note that this thread, which trains, carries out ``work`` of a program inside of this context."""
        before = self.turn_to(work)
        try:
            yield
        finally:
            self.work = before

    def turn_to(self, work: object) -> object:
        """Note that this thread, which trains, carries out ``work`` from now on; returns what it did before."""
        before, self.work, self.ident = self.work, work, threading.get_ident()
        return before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Note that it is in a backward of a script's inside of this context."""
        self.backward = True
        try:
            yield
        finally:
            self.backward = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A context in which newcomers are served nothing, wherever it waits: the state is between two steps'."""
        idle, self.idle = self.idle, lambda waiting: None
        try:
            yield
        finally:
            self.idle = idle
