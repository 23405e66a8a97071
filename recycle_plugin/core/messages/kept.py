"""What was sent over a connection and may not have got there: it is sent again where the connection goes on with
another coordinator (core/coordinator/switchboard.py).

Both ends count the messages that come, but for the greeting (Hello, Welcome), the counts themselves (Got), and who
stands by (StandsBy, Knows, Turns).
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from recycle_plugin.core.messages.from_coordinator import Posted, Refused, Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, Knows, StandsBy, Turns

UNCOUNTED = (Hello, Welcome, Refused, Got, StandsBy, Knows, Turns)
EVERY = 64  # after so many messages who receives them says how far it is
BEATS = 8  # of a supervisor, which hears little else


class Kept:
    """The frames behind the first ``dropped``, of which it is known that they have got there."""

    def __init__(self) -> None:
        self.dropped = 0
        self._frames: deque[bytes] = deque()

    @property
    def count(self) -> int:
        """How many have been sent in all."""
        return self.dropped + len(self._frames)

    def add(self, frame: bytes) -> None:
        """Keep one more."""
        self._frames.append(frame)

    def got(self, count: int) -> None:
        """Forget the first ``count``, which have got there; what was said before, or can't be, changes nothing."""
        while self._frames and self.dropped < count:
            self._frames.popleft()
            self.dropped += 1

    def since(self, count: int) -> list[bytes]:
        """All behind the first ``count``."""
        return list(islice(self._frames, max(0, count - self.dropped), None))


class Heard:
    """Counts the messages that come: ``count``."""

    def __init__(self, count: int = 0) -> None:
        self.count = self._said = count

    def is_due(self, message: object) -> bool:
        """Count ``message``; whether the other end is to hear how many have come: soon, where it keeps a long one."""
        self.count += 1
        if self.count - self._said < EVERY and not (isinstance(message, Posted) or getattr(message, "PACKS", False)):
            return False
        self._said = self.count
        return True
