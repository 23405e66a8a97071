"""Values of a script's own that it gives to a worker that comes back, such as averages of weights or counters."""

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
        """Whether a peer's script is to hand over anything."""
        return any(give is not None for _, give in self._given)

    def add(self, callback: Callback, state: Give | None) -> None:
        """Add ``callback(step, state)``, which gets what ``state()`` returns. Raises RecycleError if not callable."""
        if not callable(callback) or not (state is None or callable(state)):
            wrong = callback if not callable(callback) else state
            raise RecycleError(
                f"on_join: {wrong!r} can't be called; give a function of (step, state), and as state= a function "
                "without arguments"
            )
        self._given.append((callback, state))

    def state(self) -> bytes:
        """Return what the script hands over here, packed. An error in its functions is packed too: it concerns the
        newcomer, not this worker. Called between two committed steps, on the training thread, at the lowest live rank
        of the stage.
        """
        try:
            return packed({"states": [None if give is None else give() for _, give in self._given]})
        except Exception as error:  # a script's own; this worker trains on
            return packed({"error": f"{type(error).__name__}: {error}"})

    def joined(self, step: int, state: bytes) -> None:
        """Call the script's callbacks with ``state``, from a peer's script, after ``step``. Called in a newcomer, on
        the training thread, before its first step. Raises CantJoin if there is no usable state.
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
