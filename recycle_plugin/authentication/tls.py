"""TLS between the processes of a job: its files, and one end of a connection.

Each end shows a certificate, and accepts any that the job's ``ca.crt`` has signed. Hosts' names are not compared: the
job's secret, proved inside this very TLS connection, tells which job an end belongs to (handshake.py). Only TLS 1.3 is
used, so that a key that leaks later can't decrypt recorded traffic.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from recycle_plugin.errors import NoCredentials

SETTING = "RECYCLE_TLS"  # environment variable that names the folder of the files
ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # TLS's alert: protocol version not supported
RECORD = 1 << 14  # most bytes of a record
OWN, KEY, CA = "tls.crt", "tls.key", "ca.crt"
FILES = {
    OWN: "put this host's certificate there, in PEM",
    KEY: f"put the private key of {OWN} there, in PEM",
    CA: "put the certificate there that has signed those of all hosts, in PEM",
}
"""The files in the folder, named as in a Kubernetes secret, and what to do if one is missing."""
UNSIGNED = (f"was not signed by the {CA} beside it", f"put one there that was, or the {CA} that has signed it")
WRONG = {
    **dict.fromkeys((2, 7, 18, 19, 20, 21), UNSIGNED),
    9: ("is not valid yet, by this host's clock", "set the clock, or make a certificate that is valid now"),
    10: (f"has expired, or the {CA} beside it has", "make one that is valid as long as the job runs"),
    26: (
        "is not valid for both ends of a connection",
        "make one whose extended key usage has serverAuth and clientAuth, or that has none",
    ),
}  # by OpenSSL's error number of a certificate's verification
UNUSABLE = ("can't be used", "make another one")
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})


class NoCertificate(NoCredentials):
    """The files of the setting ``tls`` can't be used. ``wrong``: the reason; ``fix``: what to do."""

    def __init__(self, wrong: str, fix: str) -> None:
        super().__init__(f"recycle.tls: {wrong}; {fix}")
        self.wrong, self.fix = wrong, fix


class TlsFailure(ConnectionError):
    """The other end does not speak TLS, or (``spoken``) not as this job does; ``parting``: last bytes to send to it."""

    def __init__(self, done: str, spoken: bool, parting: bytes) -> None:
        super().__init__(done)
        self.spoken, self.parting = spoken, parting


class Tls:
    """A source of connections' ends, made from the files in ``folder``, which are read only here. Raises NoCertificate
    if they can't be read or do not fit together, which a trial handshake finds.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(os.path.expanduser(folder))  # Path's raises an error for an unknown user
        for name in FILES:
            _check_readable(self.folder / name)
        self._calls, self._answers = (
            _context(self.folder, kind) for kind in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
        self._answers.num_tickets = 0  # no session is resumed
        self._try()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Tls | None:
        """Return the Tls of the folder that the environment names, None if it names none. Raises NoCertificate."""
        folder = environment.get(SETTING)
        return cls(folder) if folder else None

    def end(self, calls: bool) -> TlsEnd:
        """Return the end of a new connection: the caller's (``calls``) or the answerer's."""
        return TlsEnd(self._calls if calls else self._answers, calls)

    def _try(self) -> None:
        """Connect both ends here, to find errors before another host does."""
        ends, said = (self.end(calls=True), self.end(calls=False)), b""
        try:
            for end in (*ends, *ends):
                said = end.shake(said).said
        except TlsFailure as failure:
            error = failure.__cause__
            code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else 0
            wrong, fix = WRONG.get(code, UNUSABLE)
            raise NoCertificate(f"{self.folder / OWN} {wrong} ({failure})", fix) from None


class Shaken(NamedTuple):
    """One step of a TLS handshake: the bytes to send to the other end, and whether this end has finished."""

    said: bytes
    through: bool


class TlsEnd:
    """One end of TLS without its connection: received bytes are fed to it, and its results are to be sent. Any thread
    may call it: a lock guards OpenSSL's object, which takes one thread at a time.
    """

    def __init__(self, context: ssl.SSLContext, calls: bool) -> None:
        self._came, self._said = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._came, self._said, server_side=not calls)
        self._lock = threading.Lock()
        self._failure: TlsFailure | None = None

    def shake(self, came: bytes) -> Shaken:
        """Continue the handshake with received bytes. Raises TlsFailure."""
        self._came.write(came)
        through = False
        try:
            self._end.do_handshake()
            through = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise _failed(error, self._said.read()) from error
        return Shaken(self._said.read(), through)

    @property
    def binding(self) -> bytes:
        """Bytes that only the two ends of this connection know after the handshake: the caller's Finished message."""
        found = self._end.get_channel_binding("tls-unique")
        assert found, "the handshake is over"
        return found

    def feed(self, came: bytes) -> None:
        """Add received bytes; none mean the end of the stream."""
        with self._lock:
            self._came.write(came) if came else self._came.write_eof()

    def decrypted(self, target: memoryview) -> int | None:
        """Fill ``target`` with decrypted bytes and return their number; 0 at the end, None if more must arrive first.

        An end without TLS's own close message is accepted: messages have their lengths, and processes die. Raises
        TlsFailure.
        """
        count = 0
        with self._lock:
            try:
                while count < len(target) and (read := self._read(target[count:])):
                    count += read
            except ssl.SSLWantReadError:
                return count or None
            except ssl.SSLError as error:
                self._failure = self._failure or _failed(error)
            if self._failure is not None and not count:
                raise self._failure
        return count

    def _read(self, target: memoryview) -> int:
        try:
            return int(self._end.read(len(target), target))  # type: ignore[arg-type]
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0

    def encrypted(self, data: memoryview) -> bytes:
        """Return the bytes to send for ``data``. Raises TlsFailure."""
        with self._lock:
            try:
                begin = 0
                while begin < len(data):
                    begin += self._end.write(data[begin:])
            except ssl.SSLError as error:
                raise _failed(error) from error
            return self._said.read()


def _check_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise NoCertificate(f"{path} can't be read ({error.strerror})", FILES[path.name]) from None


def _context(folder: Path, kind: ssl._SSLMethod) -> ssl.SSLContext:
    """Return one end's context, which trusts only CA and not the system's certificates."""
    made = ssl.SSLContext(kind)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust what is in CA even if it is signed by another one
    _load_certificates(made, folder / CA)
    _load_certificates(ssl.SSLContext(kind), folder / OWN)  # only to check that there is one
    _load_own(made, folder / OWN, folder / KEY)
    if (folder / KEY).stat().st_mode & stat.S_IRWXO:
        fix = f"chmod 600 {folder / KEY}; in a pod, defaultMode: 0400 at the secret's volume"
        raise NoCertificate(f"everybody on this host can use {folder / KEY}", fix)
    return made


def _load_certificates(made: ssl.SSLContext, path: Path) -> None:
    try:
        made.load_verify_locations(path)
    except ssl.SSLError:
        raise NoCertificate(f"{path} has no certificate in PEM", FILES[path.name]) from None


def _load_own(made: ssl.SSLContext, own: Path, key: Path) -> None:
    def passphrase() -> str:
        wrong = f"{key} is encrypted, and nobody is there to type its passphrase"
        raise NoCertificate(wrong, f"put there what `openssl pkey -in {key}` prints")

    try:
        made.load_cert_chain(own, key, passphrase)
    except ssl.SSLError as error:
        wrong = {"KEY_VALUES_MISMATCH": f"does not belong to {own}", None: "has no private key in PEM"}
        found = wrong.get(error.reason, f"can't be used with its certificate ({error.reason})")
        raise NoCertificate(f"{key} {found}", FILES[KEY]) from None


def _failed(error: ssl.SSLError, parting: bytes = b"") -> TlsFailure:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if error.reason in NO_TLS:
        done = "it does not speak TLS 1.3"
    elif isinstance(error, ssl.SSLCertVerificationError):
        done = f"its certificate is refused: {error.verify_message}"
    elif "alert" in reason:
        done = f"it refuses this end's certificate, or its TLS: {reason}"
    else:
        done = f"its TLS fails: {reason}"
    return TlsFailure(done, error.reason not in NO_TLS, parting)
