"""What can go wrong, as types that say who has to act.

A user's own ``except Exception`` must neither swallow the end of the job nor a membership change,
so those derive from BaseException.
"""

from __future__ import annotations


class RecycleError(RuntimeError):
    """Something that the user can mend; the message is one line and says how."""


class WaitTimeout(RecycleError):
    """A wait passed its deadline; the message names what was waited for."""


class JobEnded(BaseException):
    """The coordinator has ended the job: leave the training script now."""

    def __init__(self, reason: str, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed
