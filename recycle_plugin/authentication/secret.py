"""A job's secret, by which its processes recognize each other, and the file that holds it.

Rank 0's host makes it. The file has mode 0600, so only the job's own user can read it. The secret is nowhere else: not
in a command line, an environment variable, a log or a message.

On one host the file is in a folder of the user's own, named by the master's port. On several hosts all must see the
file, and only the user knows a place for that.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from recycle_plugin.authentication import tls as of_tls
from recycle_plugin.authentication.tls import Tls
from recycle_plugin.errors import NoCredentials

SETTING = "RECYCLE_SECRET_FILE"  # environment variable by which the user names the file
AT = "RECYCLE_SECRET_AT"  # the same, set by supervisors for their workers
OWN = 0o600  # no access for other users
OTHERS = stat.S_IRWXG | stat.S_IRWXO
SHORTEST = 32  # characters
LONGEST = 4096
KEY_BYTES = 32
SHARED = "a file in a folder that all hosts share"
WHERE = (
    f"set recycle.secret_file, in the config that --deepspeed_config names, or {SETTING} on every host, to {SHARED}; "
    "the job makes it"
)


class NoSecret(NoCredentials):
    """The job's secret is missing or invalid; the message says how to mend that."""


class NotThere(NoSecret):
    """There is no file with a secret, at least not yet."""


class Known(Protocol):
    """A source of a job's secret: a file, or the secret itself."""

    @property
    def there(self) -> bool:
        """Whether it can be read by now."""

    def read(self) -> Secret:
        """Return the secret. Raises NotThere, or NoSecret if the file has no valid secret."""


class Secret:
    """A job's secret: the ``shared`` text of at least 32 characters, which goes only into files of mode 0600. ``tls``:
    the proofs go through it, None for plain connections.
    """

    __slots__ = ("_key", "shared", "tls")

    def __init__(self, shared: str, tls: Tls | None = None) -> None:
        self.shared, self.tls = shared, tls
        self._key = hmac.digest(shared.encode(), b"recycle_plugin: the key of a job", "sha256")

    def derived(self, what: bytes) -> bytes:
        """Return 32 bytes that only holders of the secret can compute from ``what``."""
        return hmac.digest(self._key, what, "sha256")

    there = True

    def read(self) -> Secret:
        """Return the secret itself (protocol Known)."""
        return self

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        raise TypeError("a job's secret is not written down")


class SecretFile:
    """The file at ``path`` with a job's secret, which is proved inside ``tls``. ``given``: the user has named the path,
    so a file that is already there is not this job's to change.
    """

    def __init__(self, path: Path, given: bool, tls: Tls | None = None) -> None:
        self.path, self._given, self._tls = path.absolute(), given, tls
        self._secret: Secret | None = None
        self._made = ""  # what this process has put there

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SecretFile:
        """Return the secret file of the job that the variables of ``environment`` describe. Raises NoSecret if the job
        is on several hosts and no variable names the file; NoCertificate.
        """
        tls = Tls.of(environment)
        if named := environment.get(SETTING):
            return cls(Path(os.path.expanduser(named)), True, tls)
        ranks = int(environment.get("WORLD_SIZE", "1"))
        if ranks > int(environment.get("LOCAL_SIZE", ranks)):
            raise NoSecret(f"this job is on several hosts, and its secret would not get to all of them: {WHERE}")
        return cls.at(int(environment["MASTER_PORT"]), tls)

    @classmethod
    def at(cls, port: int, tls: Tls | None = None) -> SecretFile:
        """Return the file of a job on this host whose master listens at ``port``, if the user names none."""
        return cls(Path("/tmp", f"recycle-{os.geteuid()}", f"{socket.gethostname()}-{port}"), False, tls)

    @classmethod
    def of_worker(cls, environment: Mapping[str, str]) -> SecretFile:
        """Return the file that a worker's supervisor names. Raises NoCertificate."""
        return cls(Path(environment[AT]), True, Tls.of(environment))

    def make(self) -> Secret:
        """Return the secret, made anew unless the user's file exists; :meth:`put` writes it. Raises NoSecret."""
        if not (self._given and self.there):
            self._made = secrets.token_hex(KEY_BYTES)
            self._secret = Secret(self._made, self._tls)
        return self.read()

    def put(self) -> None:
        """Write a secret made here. A folder that the user has not named must be private. Raises NoSecret."""
        if not self._made:
            return
        folder = self.path.parent
        try:
            if not self._given:
                folder.mkdir(mode=0o700, exist_ok=True)
            elif not folder.is_dir():
                raise NoSecret(f"there is no folder {folder}, where the job's secret is to be: make it, or {WHERE}")
            status = folder.lstat()
            own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS
            if not (self._given or own):
                raise NoSecret(f"{folder}, for the job's secret, is not this user's, or others can use it: remove it")
            write_own(self.path, self._made)
        except OSError as error:
            raise NoSecret(f"the job's secret can't be written to {self.path} ({error.strerror}): {WHERE}") from None

    def adopt(self) -> None:
        """Own the secret that was read here: the process that made it is dead."""
        if not self._given and self._secret is not None:
            self._made = self._secret.shared

    def keep(self) -> None:
        """Write the file again if it is gone or this job's; to be called now and then. Raises NoSecret. Many systems
        remove files from their temporary folder after days without use. Another job's file at the same path stays.
        """
        if self._made and (self._is_own or not self.path.exists()):
            self.put()

    def remove(self) -> None:
        """Remove the file at the end of the job, if it is the one that :meth:`put` wrote."""
        if self._is_own:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    @property
    def _is_own(self) -> bool:
        try:
            return bool(self._made) and _checked(self.path) == self._made
        except (OSError, NoSecret):
            return False

    @property
    def there(self) -> bool:
        """Whether there is a file. Until this job's master listens it may be an earlier job's."""
        return self._secret is not None or self.path.exists()

    def read(self) -> Secret:
        """Return the secret, which is read once. Raises NotThere, or NoSecret if the file has no valid secret."""
        if self._secret is None:
            try:
                self._secret = Secret(_checked(self.path), self._tls)
            except FileNotFoundError:
                raise NotThere(f"its secret is not at {self.path}; if this is not the master's host, {WHERE}") from None
            except OSError as error:
                raise NoSecret(f"the job's secret at {self.path} can't be read ({error.strerror})") from None
        return self._secret


def check_heeded(secret_file: str | None, tls: str | None, environment: Mapping[str, str]) -> None:
    """Raise NoSecret if the setting ``secret_file`` or ``tls`` came too late for the launcher."""
    for set_, name, variable, what in (
        (secret_file, "secret_file", SETTING, "where processes find each other's secret"),
        (tls, "tls", of_tls.SETTING, "by which certificates processes know each other"),
    ):
        if set_ and variable not in environment:
            raise NoSecret(
                f"recycle.{name} says {what}, which they had to know before this config was read: put it into a "
                f"file, and name that on the script's command line with --deepspeed_config; or set {variable}"
            )


def write_own(path: Path, text: str) -> None:
    """Write a file that only this user can read, and replace the old one. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN), "w") as file:
            file.write(text)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _checked(path: Path) -> str:
    """Return the text of a file that only its owner can read. Raises OSError, and NoSecret if it is not such a file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & OTHERS:
            raise NoSecret(f"{path} can't be the job's secret: it has to be a file of this user, with mode 0600")
        text = file.read(LONGEST).strip()
    if len(text) < SHORTEST:
        raise NoSecret(f"{path} has {len(text)} characters, and the job's secret has at least {SHORTEST}")
    return text
