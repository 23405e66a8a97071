"""The hash of a stage's state, computed by a thread while training goes on, until the state is about to change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.state.stage_state import StageState

HASH_S = 300.0  # longest wait for a hash


class BackgroundHash:
    """Hashes ``state`` in a thread, which calls ``tell(step, digest)`` at the end, when nobody has to wait any more.
    Before the state changes, by a step, an undo or a checkpoint, call :meth:`finish`.
    """

    def __init__(self, state: StageState, tell: Callable[[int, str], None]) -> None:
        self._state, self._tell = state, tell
        self._over = threading.Event()
        self._over.set()
        self._step = 0
        self._error: Exception | None = None

    def hash_state(self, step: int) -> None:
        """Begin to hash the present state, that after ``step``; waits for the last hash."""
        self.finish()
        assert self._state.step == step, f"the state is that after step {self._state.step}, not {step}"
        compute = self._state.digesting()
        self._step = step
        self._over.clear()
        threading.Thread(target=self._work, args=(step, compute), name="recycle: hash", daemon=True).start()

    def finish(self, timeout_s: float = HASH_S) -> None:
        """Return once no hash is being computed. Raises the error that it has failed with, or WaitTimeout."""
        if not self._over.wait(timeout_s):
            raise WaitTimeout(f"waited {timeout_s:g} s for the hash of the state after step {self._step}")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, step: int, compute: Callable[[], str]) -> None:
        try:
            found = compute()
        except Exception as error:  # of the device; raised in the thread that trains
            self._error = error
            self._over.set()
            return
        self._over.set()
        self._tell(step, found)  # the next hash may have begun by now
