"""The setting ``tls``: files that are there, belong together and are valid, or one line that says what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_plugin.authentication.tls import VARIABLES, Tls, TlsFiles
from recycle_plugin.errors import NoCredentials
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError
from tests.support.certificates import authority, encrypted, files, weak

BOTH = "extendedKeyUsage=serverAuth,clientAuth"
ONE = "extendedKeyUsage=serverAuth"
OF_CERT = "write the path of a PEM file with this host's certificate"
OF_KEY = "write the path of a PEM file with the private key of recycle.tls.cert"
OF_CA = "write the path of a PEM file with the certificate that has signed those of all hosts"


def section(found: TlsFiles) -> dict:
    return {"tls": found._asdict()}


def test_it_is_off_by_default_and_takes_three_files_that_belong_together():
    assert Settings.from_section({}).tls is None
    found = Settings.from_section(section(files()))
    assert found.tls is not None and found.tls.model_dump() == files()._asdict()


@pytest.mark.parametrize(
    "made",
    [
        lambda: files(extensions=BOTH),
        lambda: TlsFiles(*map(str, authority("alone")), str(authority("alone")[0])),
        lambda: files("gamma", "between"),
    ],
    ids=("for both ends", "one that has signed itself", "one that another ca has signed"),
)
def test_what_else_may_be_there(made):
    Settings.from_section(section(made()))


def wrong() -> dict[str, tuple[TlsFiles, str]]:
    """What is named, and what is said of it."""
    good, other, junk = files(), files("beta"), str(Path(__file__))
    old, single, short, public = files(days=0), files(extensions=ONE), weak(), files("delta")
    Path(public.key).chmod(0o644)
    return {
        "no file": (
            good._replace(cert="/no/such.pem"),
            f"cert: /no/such.pem can't be read (No such file or directory); {OF_CERT}",
        ),
        "a folder": (good._replace(ca="/tmp"), f"ca: /tmp can't be read (Is a directory); {OF_CA}"),
        "no ca": (good._replace(ca=junk), f"ca: {junk} has no certificate in PEM; {OF_CA}"),
        "no certificate": (good._replace(cert=good.key), f"cert: {good.key} has no certificate in PEM; {OF_CERT}"),
        "another's key": (good._replace(key=other.key), f"key: {other.key} does not belong to {good.cert}; {OF_KEY}"),
        "a certificate as key": (good._replace(key=good.cert), f"key: {good.cert} has no private key in PEM; {OF_KEY}"),
        "everybody's key": (public, f"key: everybody on this host can use {public.key}; chmod 600 {public.key}"),
        "a short key": (short, f"key: {short.key} can't be used with its certificate (EE_KEY_TOO_SMALL); {OF_KEY}"),
        "a passphrase": (
            good._replace(key=encrypted(good.key)),
            f"key: {encrypted(good.key)} is encrypted, and nobody is there to type its passphrase; "
            f"write the path of what `openssl pkey -in {encrypted(good.key)}` prints",
        ),
        "another ca": (
            good._replace(ca=str(authority("other")[0])),
            f"cert: {good.cert} was not signed by recycle.tls.ca (its certificate is refused: unable to get local "
            "issuer certificate); name one that was, or the ca that has signed it",
        ),
        "expired": (
            old,
            f"cert: {old.cert} has expired, or recycle.tls.ca has (its certificate is refused: certificate has "
            "expired); make one that is valid as long as the job runs",
        ),
        "for one end": (
            single,
            f"cert: {single.cert} is not for both ends of a connection (its certificate is refused: unsuitable "
            "certificate purpose); make one whose extended key usage has serverAuth and clientAuth, or that has none",
        ),
    }  # fmt: skip


WRONG = ("no file", "a folder", "no ca", "no certificate", "another's key", "a certificate as key",
         "everybody's key", "a short key", "a passphrase", "another ca", "expired", "for one end")  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_can_not_be_used_gets_one_line(what):
    """The same one from the section of a config, and from the environment, by which processes are told of it."""
    named, said = wrong()[what]
    with pytest.raises(SettingsError) as of_section:
        Settings.from_section(section(named))
    with pytest.raises(NoCredentials) as of_process:
        Tls.of(named.variables)
    assert str(of_section.value) == str(of_process.value) == f"recycle.tls.{said}"


def test_all_that_can_be_wrong_is_tried():
    assert wrong().keys() == set(WRONG)


def test_the_environment_names_all_of_it_or_none():
    assert TlsFiles.of({}) is None and TlsFiles.of(files().variables) == files()
    assert files().variables.keys() == set(VARIABLES.values())
    with pytest.raises(NoCredentials, match=r"^recycle\.tls\.cert: is missing; "):
        TlsFiles.of({VARIABLES["ca"]: "ca.pem"})
    for given, missing in ({}, "cert"), (files()._asdict() | {"key": None}, "key"):
        with pytest.raises(SettingsError, match=rf"^recycle\.tls\.{missing}: is missing; "):
            Settings.from_section({"tls": given})


def test_the_users_own_folder_may_be_written_as_one_writes_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert TlsFiles.named({"cert": "~/a.pem", "key": "~/a.key", "ca": "ca.pem"}).key == "/home/somebody/a.key"
