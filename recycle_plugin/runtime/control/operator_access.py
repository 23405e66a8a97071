"""An operator's access to a running job: the coordinator's address, the job's secret, and its TLS files. While the job
runs, they are in a file of the run folder that only the job's user can read.
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
    """Access to the coordinator at ``address`` (host, port) with the job's ``secret``."""

    address: tuple[str, int]
    secret: Secret
    _path: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> OperatorAccess | None:
        """Return the access to a run folder's job, None if none runs. Raises OSError if the file can't be read (another
        user's), ValueError if it is malformed, NoCertificate if the job's TLS files are missing here.
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
        """Write the access to a run folder, over an earlier job's. Return why that fails, or ""."""
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
        """Remove the file if it was written: no more requests are possible."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
