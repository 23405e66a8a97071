"""Certificates of a job's own, as `openssl` makes them; each is made once in a test run's process."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from recycle_plugin.authentication.secret import Secret
from recycle_plugin.authentication.tls import CA, KEY, OWN, Tls
from tests.support.secret import SHARED

NEW = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="certificates-")


def _openssl(*arguments: object) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def authority(name: str = "ca") -> tuple[Path, Path]:
    """What signs certificates, and its key: files in PEM.  "between" is signed by "ca" itself."""
    if name == "between":
        signed = files(name, extensions="basicConstraints=CA:TRUE")
        return signed / OWN, signed / KEY
    made, key = (Path(_folder().name, f"{name}.{kind}") for kind in ("pem", "key"))
    if not made.exists():
        _openssl("req", "-x509", *NEW, "-keyout", key, "-out", made, "-subj", f"/CN={name}", "-days", 2)
    return made, key


def files(host: str = "alpha", ca: str = "ca", days: int = 2, extensions: str = "") -> Path:
    """A folder with a certificate of ``host`` that ``ca`` has signed: valid for so many days, with 0 not any more."""
    signer, signers_key = authority(ca)
    at = Path(_folder().name, f"{host}-{ca}-{days}-{extensions.replace('=', '-')}")
    if not at.exists():
        at.mkdir()
        request, more = at / "request", at / "extensions"
        more.write_text(extensions)
        _openssl("req", *NEW, "-keyout", at / KEY, "-out", request, "-subj", f"/CN={host}")
        signed = ["-CA", signer, "-CAkey", signers_key, "-days", days, "-extfile", more]
        _openssl("x509", "-req", "-in", request, "-out", at / OWN, *signed)
        shutil.copy(signer, at / CA)
    return at


def changed(folder: Path, **instead: Path | None) -> Path:
    """A copy of ``folder``, in which own, key or ca is another file, or is not there."""
    copy = Path(tempfile.mkdtemp(dir=_folder().name))
    given = {"own": folder / OWN, "key": folder / KEY, "ca": folder / CA} | instead
    for name, path in zip((OWN, KEY, CA), given.values()):
        if path is not None and path.is_dir():
            (copy / name).mkdir()
        elif path is not None:
            shutil.copy(path, copy / name)
    return copy


def weak() -> Path:
    """A certificate that has signed itself, of a key that is too short for anybody to take it."""
    made, key = (Path(_folder().name, f"weak.{kind}") for kind in ("pem", "key"))
    _openssl("req", "-x509", "-newkey", "rsa:512", "-nodes", "-keyout", key, "-out", made, "-subj", "/CN=weak")
    return changed(made.parent, own=made, key=key, ca=made)


def encrypted(key: Path) -> Path:
    made = Path(_folder().name, "encrypted")
    _openssl("pkey", "-in", key, "-aes128", "-passout", "pass:open sesame", "-out", made)
    return made


def tls_secret(host: str = "alpha", ca: str = "ca") -> Secret:
    """The tests' own secret, proved within TLS with that host's certificate."""
    return Secret(SHARED, Tls(files(host, ca)))
