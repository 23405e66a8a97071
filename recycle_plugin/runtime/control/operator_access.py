"""An operator's way to a job that runs: where its coordinator listens, and the token by which the job knows its own
user.

Both are in a file of the run folder that nobody else can read, as long as the job runs.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

FILE = "operator.json"
OWN = 0o600  # nobody else reads it, or writes it


@dataclass
class OperatorAccess:
    """The way to the coordinator at ``address``, host and port."""

    address: tuple[str, int]
    token: str = field(repr=False)
    _path: Path | None = None

    @classmethod
    def to(cls, address: tuple[str, int]) -> OperatorAccess:
        """Returns the access to a coordinator that is about to listen, with a token that nobody can guess."""
        return cls(address, secrets.token_hex(32))

    @classmethod
    def read(cls, folder: Path) -> OperatorAccess | None:
        """The access to the job of a run folder; None where there is none, since no job runs.  Raises OSError where it
        is another user's, and ValueError where it is none.
        """
        path = folder / FILE
        try:
            said = json.loads(path.read_text())
            host, port, token = said["host"], said["port"], said["token"]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is no file of a job's") from None
        return cls((str(host), int(port)), str(token))

    def write(self, folder: Path) -> str:
        """Writes it to a run folder, in place of an earlier job's; returns why that can't be, or an empty string."""
        path = folder / FILE
        host, port = self.address
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWN), "w") as file:
                json.dump({"host": host, "port": port, "token": self.token}, file)
        except OSError as error:
            return f"recycle leave, drain and admit will find no way to this job: {path}: {error.strerror}"
        self._path = path
        return ""

    def remove(self) -> None:
        """Removes it again, if it was written: nothing can be asked for any more."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
