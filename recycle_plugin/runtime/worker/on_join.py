"""What scripts do themselves when a worker comes back: hand over what is theirs alone, an average of weights or
counters of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.errors import CantJoin, RecycleError
from recycle_plugin.runtime.state.packing import packed, unpacked_objects

Callback = Callable[[int, Any], object]
Give = Callable[[], Any]


class OnJoin:
    """The functions that a script has given to ``on_join``, in its order, which is the same on all workers."""

    def __init__(self) -> None:
        self._given: list[tuple[Callback, Give | None]] = []

    @property
    def wants_state(self) -> bool:
        """Whether there is anything that a peer's script is to hand over."""
        return any(give is not None for _, give in self._given)

    def add(self, callback: Callback, state: Give | None) -> None:
        """Add a pair of functions: ``state()`` gives what ``callback(step, state)`` gets.  Raises RecycleError for what
        can't be called.
        """
        if not callable(callback) or not (state is None or callable(state)):
            wrong = callback if not callable(callback) else state
            raise RecycleError(
                f"on_join: {wrong!r} can't be called; give a function of (step, state), and as state= a function "
                "without arguments"
            )
        self._given.append((callback, state))

    def state(self) -> bytes:
        """What the script hands over here; an error of its function's is the newcomer's business, and not this
        worker's.

        Called between two steps that are committed, in the thread that trains, at the lowest live rank of the stage.
        """
        try:
            return packed({"states": [None if give is None else give() for _, give in self._given]})
        except Exception as error:  # a script's, or of what it has given; whoever trains goes on
            return packed({"error": f"{type(error).__name__}: {error}"})

    def joined(self, step: int, state: bytes) -> None:
        """Hand over ``state``, from a peer's script, after ``step``.  Raises CantJoin where it can't be.

        Called in a newcomer, in the thread that trains, before its first step.
        """
        found: dict[str, Any] = {"states": [None] * len(self._given)}
        if self.wants_state:
            nothing = {"error": "it is gone, and nothing has come"}
            found = unpacked_objects(state) if state else nothing
        if "error" in found:
            raise CantJoin(f"on_join: a peer's state= has failed, so there is nothing to go on with: {found['error']}")
        if len(found["states"]) != len(self._given):
            raise CantJoin(
                f"on_join was called {len(self._given)} times here, and {len(found['states'])} times at a peer: call "
                "it alike on all workers, before the first step"
            )
        for (callback, _), each in zip(self._given, found["states"], strict=True):
            callback(step, each)
