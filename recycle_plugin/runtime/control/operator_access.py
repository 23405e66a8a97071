"""An operator's access to a running job: the coordinator's address, the job's secret, and its TLS files. While the job
runs, they are in a file of the run folder that only the job's user can read.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from recycle_plugin.authentication.secret import Secret, write_own
from recycle_plugin.authentication.tls import Tls
from recycle_plugin.core.messages.typed import Unreadable, read

FILE = "operator.json"


@dataclass(frozen=True)
class _Said:
    """The contents of the file."""

    host: str
    port: int
    secret: str
    tls: str | None

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"{self.port} is no port")


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
            said = read(_Said, json.loads(path.read_text()), "it")
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            said = Unreadable("it", "is no JSON")
        if isinstance(said, Unreadable):
            raise ValueError(f"{path} is not a file of a job: {said}")
        return cls((said.host, said.port), Secret(said.secret, Tls(said.tls) if said.tls else None))

    def write(self, folder: Path) -> str:
        """Write the access to a run folder, over an earlier job's. Return why that fails, or ""."""
        path = folder / FILE
        host, port = self.address
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tls = str(self.secret.tls.folder.absolute()) if self.secret.tls else None
            write_own(path, json.dumps(asdict(_Said(host, port, self.secret.shared, tls))))
        except OSError as error:
            return f"recycle leave, drain and admit can't reach this job: {path}: {error.strerror}"
        self._path = path
        return ""

    def remove(self) -> None:
        """Remove the file if it was written: no more requests are possible."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
