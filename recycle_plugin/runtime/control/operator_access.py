"""An operator's way to a job that runs: where its coordinator listens, the job's secret, and the files of its TLS.

All are in a file of the run folder that nobody else can read, as long as the job runs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recycle_plugin.authentication.secret import Secret, write_own
from recycle_plugin.authentication.tls import Tls

FILE = "operator.json"


@dataclass
class OperatorAccess:
    """The way to the coordinator at ``address``, host and port, which knows its own by ``secret``."""

    address: tuple[str, int]
    secret: Secret
    _path: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> OperatorAccess | None:
        """The access to the job of a run folder; None where there is none, since no job runs.  Raises OSError where it
        is another user's, ValueError where it is none, and NoCertificate where the job's TLS can't be had here.
        """
        path = folder / FILE
        try:
            said = json.loads(path.read_text())
            host, port, shared, tls = said["host"], said["port"], said["secret"], said["tls"]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is no file of a job's") from None
        return cls((str(host), int(port)), Secret(str(shared), Tls(tls) if tls else None))

    def write(self, folder: Path) -> str:
        """Writes it to a run folder, in place of an earlier job's; returns why that can't be, or an empty string."""
        path = folder / FILE
        host, port = self.address
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tls = str(self.secret.tls.folder.absolute()) if self.secret.tls else None
            write_own(path, json.dumps({"host": host, "port": port, "secret": self.secret.shared, "tls": tls}))
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
