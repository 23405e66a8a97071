"""Messages that were sent over a connection and may be lost; they are sent again if the connection goes on with another
coordinator (core/coordinator/switchboard.py).

Both ends count the messages that they receive, except the greeting (Hello, Welcome, Refused), the counts themselves
(Got), and the standby's (StandsBy, Knows, Turns, SentBack).
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from recycle_plugin.core.messages.from_coordinator import Posted, Refused, StoreAnswer, Welcome
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.core.messages.mirroring import Got, Knows, SentBack, StandsBy, Turns

UNCOUNTED = (Hello, Welcome, Refused, Got, StandsBy, Knows, Turns, SentBack)
EVERY = 64  # after so many messages the receiver reports its count
BEATS = 8  # the same for a supervisor's messages; it hears little else


class Kept:
    """The frames behind the first ``dropped``, which are known to have been received."""

    def __init__(self) -> None:
        self.dropped = 0
        self._frames: deque[bytes] = deque()

    @property
    def count(self) -> int:
        """The number of frames sent in all."""
        return self.dropped + len(self._frames)

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)

    def got(self, count: int) -> None:
        """Drop the first ``count`` frames, which were received; an old or impossible count changes nothing."""
        while self._frames and self.dropped < count:
            self._frames.popleft()
            self.dropped += 1

    def since(self, count: int) -> list[bytes]:
        """Return all frames behind the first ``count``."""
        return list(islice(self._frames, max(0, count - self.dropped), None))


class Heard:
    """Counts the messages received: ``count``."""

    def __init__(self, count: int = 0) -> None:
        self.count = self._said = count

    def is_due(self, message: object) -> bool:
        """Count ``message``. Return whether the other end is to hear the count; sooner if it keeps a long message."""
        self.count += 1
        long = isinstance(message, Posted | StoreAnswer) or getattr(message, "PACKS", False)
        if self.count - self._said < EVERY and not long:
            return False
        self._said = self.count
        return True
