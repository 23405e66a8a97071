"""The package's errors. Each type says who has to act."""

from __future__ import annotations


class RecycleError(RuntimeError):
    """An error that the user can correct; the message is one line and says how."""


class NoCredentials(RecycleError):
    """A process's credentials for the job are missing or invalid; the message says how to mend that."""


class NotSaved(RecycleError, OSError):
    """A checkpoint was not written, because at least one worker could not write it. It is raised on all workers; if the
    script catches it, training goes on.
    """


class DataIsOver(RecycleError, StopIteration):
    """The data iterators of all replicas have ended, as at the end of an epoch; raised on all workers. A script that
    catches it, as a StopIteration, may go on with other iterators.
    """


class CantJoin(RecycleError):
    """A newcomer has nothing to go on with. Only this newcomer is lost."""


class Refused(BaseException):
    """A newcomer's script has caught the error of a refusal and gone on: it ends now, since it may have left out a part
    of what the others' scripts have done. No Exception: a user's own ``except Exception`` must not swallow it.
    """


class WaitTimeout(RecycleError):
    """A wait passed its deadline; the message names the awaited thing."""


class DeviceStuck(RuntimeError):
    """This worker's device does not finish its work. Only this worker is lost."""


class CutOff(RecycleError):
    """The coordinator is out of reach: this worker may be on the smaller side of a cut. It exits with ``code``."""

    code = 4
