"""The setting ``tls``: files that are there, belong together and are valid, or one line that says what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle_plugin.authentication.tls import KEY, OWN, SETTING, Tls
from recycle_plugin.errors import NoCredentials
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError
from tests.support.certificates import authority, changed, encrypted, files, weak

BOTH = "extendedKeyUsage=serverAuth,clientAuth"
ONE = "extendedKeyUsage=serverAuth"
OF_CERT = "put this host's certificate there, in PEM"
OF_KEY = "put the private key of tls.crt there, in PEM"
OF_CA = "put the certificate there that has signed those of all hosts, in PEM"


def test_it_is_off_by_default_and_takes_a_folder_of_three_files_that_belong_together():
    assert Settings.from_section({}).tls is None
    assert Settings.from_section({"tls": str(files())}).tls == str(files())


def test_a_folder_of_an_unknown_user_is_one_that_is_not_there():
    with pytest.raises(SettingsError, match=r"recycle\.tls: ~nobody-of-that-name/tls"):
        Settings.from_section({"tls": "~nobody-of-that-name/tls"})


def itself() -> Path:
    made, key = authority("alone")
    return changed(made.parent, own=made, key=key, ca=made)


@pytest.mark.parametrize(
    "made",
    [lambda: files(extensions=BOTH), itself, lambda: files("gamma", "between")],
    ids=("for both ends", "one that has signed itself", "one that another ca has signed"),
)
def test_what_else_may_be_there(made):
    Settings.from_section({"tls": str(made())})


def wrong() -> dict[str, tuple[Path, str]]:
    good, junk = files(), Path(__file__)
    public = changed(good)
    (public / KEY).chmod(0o644)
    return {
        "no file": (changed(good, own=None), f"/tls.crt can't be read (No such file or directory); {OF_CERT}"),
        "a folder": (changed(good, ca=junk.parent), f"/ca.crt can't be read (Is a directory); {OF_CA}"),
        "no ca": (changed(good, ca=junk), f"/ca.crt has no certificate in PEM; {OF_CA}"),
        "no certificate": (changed(good, own=good / KEY), f"/tls.crt has no certificate in PEM; {OF_CERT}"),
        "another's key": (changed(good, key=files("beta") / KEY), f"/tls.key does not belong to /tls.crt; {OF_KEY}"),
        "a certificate as key": (changed(good, key=good / OWN), f"/tls.key has no private key in PEM; {OF_KEY}"),
        "everybody's key": (
            public,
            "everybody on this host can use /tls.key; chmod 600 /tls.key; in a pod, defaultMode: 0400 at the secret's "
            "volume",
        ),
        "a short key": (weak(), f"/tls.key can't be used with its certificate (EE_KEY_TOO_SMALL); {OF_KEY}"),
        "a passphrase": (
            changed(good, key=encrypted(good / KEY)),
            "/tls.key is encrypted, and nobody is there to type its passphrase; put there what `openssl pkey -in "
            "/tls.key` prints",
        ),
        "another ca": (
            changed(good, ca=authority("other")[0]),
            "/tls.crt was not signed by the ca.crt beside it (its certificate is refused: unable to get local issuer "
            "certificate); put one there that was, or the ca.crt that has signed it",
        ),
        "expired": (
            files(days=0),
            "/tls.crt has expired, or the ca.crt beside it has (its certificate is refused: certificate has expired); "
            "make one that is valid as long as the job runs",
        ),
        "for one end": (
            files(extensions=ONE),
            "/tls.crt is not valid for both ends of a connection (its certificate is refused: unsuitable certificate "
            "purpose); make one whose extended key usage has serverAuth and clientAuth, or that has none",
        ),
    }


WRONG = ("no file", "a folder", "no ca", "no certificate", "another's key", "a certificate as key",
         "everybody's key", "a short key", "a passphrase", "another ca", "expired", "for one end")  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_can_not_be_used_gets_one_line(what):
    """The same one from the section of a config, and from the environment, by which processes are told of it."""
    folder, said = wrong()[what]
    with pytest.raises(SettingsError) as of_section:
        Settings.from_section({"tls": str(folder)})
    with pytest.raises(NoCredentials) as of_process:
        Tls.of({SETTING: str(folder)})
    assert str(of_section.value) == str(of_process.value)
    assert str(of_process.value).replace(str(folder), "") == f"recycle.tls: {said}"


def test_all_that_can_be_wrong_is_tried():
    assert wrong().keys() == set(WRONG)


def test_the_environment_names_a_folder_or_none():
    assert Tls.of({}) is None and Tls.of({SETTING: str(files())}).folder == files()


def test_the_users_own_folder_may_be_written_as_one_writes_it(monkeypatch):
    monkeypatch.setenv("HOME", str(files().parent))
    assert Tls(f"~/{files().name}").folder == files()
