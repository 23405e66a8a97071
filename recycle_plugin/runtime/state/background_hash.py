"""The hash of a stage's state, computed by a thread while training goes on, until something is to change the state."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.state.stage_state import StageState

HASH_S = 300.0  # how long a hash may take that somebody waits for


class BackgroundHash:
    """Hashes ``state``; ``tell(step, digest)`` is called in the thread when a hash is there and nobody has to wait any
    more.

    Whoever is to change the state, by a step, an undo, a checkpoint, calls :meth:`wait` before.
    """

    def __init__(self, state: StageState, tell: Callable[[int, str], None]) -> None:
        self._state, self._tell = state, tell
        self._over = threading.Event()
        self._over.set()
        self._step = 0
        self._error: Exception | None = None

    def hash_state(self, step: int) -> None:
        """Begin to hash the present state, that after ``step``."""
        self.finish()
        assert self._state.step == step, f"the state is that after step {self._state.step}, not {step}"
        compute = self._state.digesting()
        self._step = step
        self._over.clear()
        threading.Thread(target=self._work, args=(compute,), name="recycle: hash", daemon=True).start()

    def hash_done(self) -> bool:
        """Whether no hash is being computed."""
        return self._over.is_set()

    def finish(self, timeout_s: float = HASH_S) -> None:
        """Return once no hash is being computed.  Raises what that has failed with, or WaitTimeout."""
        if not self._over.wait(timeout_s):
            raise WaitTimeout(f"waited {timeout_s:g} s for the hash of the state after step {self._step}")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, compute: Callable[[], str]) -> None:
        try:
            found = compute()
        except Exception as error:  # a device's, for the thread that trains
            self._error = error
            self._over.set()
            return
        self._over.set()
        self._tell(self._step, found)
