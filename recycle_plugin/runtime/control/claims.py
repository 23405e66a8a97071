"""Claims on the folders that a job writes to: while it runs, no other job writes there. The coordinator's process holds
a lock (flock) on a file in each folder. The kernel drops the lock when the process ends, however it ends, so a dead job
holds none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.folders import FULL

LOCK = ".recycle-lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


class Claims:
    """A job's claimed folders. ``warn`` gets a line for each that can't be locked. ``owner``: the text in its lock
    files: job, process, host.
    """

    def __init__(self, warn: Callable[[str], None], owner: str = "") -> None:
        self._warn, self._owner = warn, owner
        self._held: dict[Path, int] = {}  # by lock file: its open descriptor
        self._before: list[Path] = []  # lock files that this job's earlier process held

    def take(self, job: JobSpec, job_id: str) -> str:
        """Create and claim all folders of ``job``. Return why one can't be claimed, or ""."""
        self._owner = f"job {job_id}, process {os.getpid()} on host {socket.gethostname()}"
        for setting, folder in (("run_dir", job.run_dir), *job.folders):
            if why := self.claim(setting, Path(folder)):
                return why
        return ""

    def release(self) -> None:
        """Release all folders, also those that the job's earlier process has left behind."""
        for path in self._before:
            with suppress(OSError):  # the earlier process is still there
                self._lock(path)
        for path, descriptor in self._held.items():
            with suppress(OSError):
                if _is_at(path, descriptor):  # else it was removed, and another job may have one there
                    path.unlink()
            os.close(descriptor)
        self._held.clear()

    def claim(self, setting: str, folder: Path) -> str:
        """Create and claim ``folder``, which ``setting`` names. Return why that fails, or ""."""
        path = Path(os.path.realpath(folder), LOCK)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while path not in self._held:
                self._lock(path)
        except BlockingIOError:
            if _holder(path).split(",")[0] == self._owner.split(",")[0]:
                self._before.append(path)
                return ""  # an earlier process of this job
            return (
                f"recycle.{setting}: {folder} is the folder of {_holder(path)}, which runs: set it to another folder, "
                "or wait until that job has ended"
            )
        except OSError as error:
            why = f"recycle.{setting}: the folder {folder}"
            if error.errno not in (*NO_LOCKS, *FULL):
                return f"{why} can't be made or written to ({error.strerror}): set another one"
            self._warn(f"{why} can't be locked ({error.strerror}): make sure that no other job uses it")
        return ""

    def _lock(self, path: Path) -> None:
        """Lock the file at ``path``. Nothing is held if another job has just removed it: try again. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, self._owner.encode())
                self._held[path], descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` names the open file. Raises OSError."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Return the job that holds the lock at ``path``, in words."""
    try:
        return path.read_text(errors="replace")[:200] or "another job"
    except OSError:
        return "another job"
