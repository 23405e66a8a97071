"""What can go wrong, as types that say who has to act."""

from __future__ import annotations


class RecycleError(RuntimeError):
    """Something that the user can mend; the message is one line and says how."""


class NoCredentials(RecycleError):
    """What a process of a job is to prove itself with is not there, or is none; the message says what to do."""


class NotSaved(RecycleError, OSError):
    """A checkpoint could not be written, by one worker at least, and so by none.

    It is raised on all of them, and where a script catches it training goes on.
    """


class DataIsOver(RecycleError, StopIteration):
    """The data iterators of all replicas have ended, as the end of an epoch; it is raised on all workers.

    Where a script catches it, as a StopIteration, it may go on with other iterators.
    """


class CantJoin(RecycleError):
    """Who comes back has nothing to go on with, which is its own loss and nobody else's."""


class WaitTimeout(RecycleError):
    """A wait passed its deadline; the message names what was waited for."""


class DeviceStuck(RuntimeError):
    """This worker's device does not come to an end, which is its own loss and nobody else's."""


class CutOff(RecycleError):
    """The coordinator can't be heard, so this worker may be on the smaller side of a broken network.

    It exits with ``code``.
    """

    code = 4
