"""A job's secret and its file, the handshake, and what strangers may take."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from recycle_plugin.authentication import door as door_module
from recycle_plugin.authentication.door import ADDRESSES, OTHERS, UNPROVED, Door
from recycle_plugin.authentication.handshake import (
    MAGIC,
    NONCE,
    PROOF,
    Answerer,
    Caller,
    Port,
    Seals,
    Stranger,
    answer,
    call,
)
from recycle_plugin.authentication.secret import SETTING, NoSecret, NotThere, Secret, SecretFile, check_heeded
from recycle_plugin.authentication.tls import SETTING as FOLDER
from recycle_plugin.launch import with_credentials
from tests.support.secret import SECRET

PATIENCE_S = 30.0


# --- the file ------------------------------------------------------------------------------------------


def test_what_the_job_makes_is_read_by_its_own_user_alone_and_goes_with_it(tmp_path):
    (tmp_path / "shared").mkdir()
    file = SecretFile(tmp_path / "shared" / "secret", True)
    assert not file.there
    with pytest.raises(NotThere, match="recycle.secret_file"):
        file.read()
    made = file.make()
    assert not file.path.exists(), "not before the port is the job's"
    file.put()
    assert file.path.stat().st_mode & 0o777 == 0o600 and list(file.path.parent.iterdir()) == [file.path]
    assert SecretFile(file.path, True).read().derived(b"x") == made.derived(b"x")
    file.path.unlink()
    file.keep()
    assert SecretFile(file.path, True).read().derived(b"x") == made.derived(b"x"), "as before"
    file.remove()
    assert not file.path.exists()
    assert SecretFile(file.path, True).make().derived(b"x") != made.derived(b"x"), "each job has its own"


def test_one_that_the_user_has_put_there_is_used_and_stays(tmp_path):
    path = tmp_path / "secret"
    path.write_text("y" * 40 + "\n")
    path.chmod(0o600)
    file = SecretFile(path, True)
    assert file.make().derived(b"x") == Secret("y" * 40).derived(b"x")
    file.put()
    file.remove()
    assert path.read_text() == "y" * 40 + "\n"


def test_what_another_job_with_the_same_path_has_put_there_is_neither_replaced_nor_removed(tmp_path):
    """Where this one's was removed meanwhile, by who empties the folder."""
    file, other = (SecretFile(tmp_path / "secret", True) for _ in range(2))
    file.make()
    file.put()
    file.path.unlink()
    theirs = other.make()
    other.put()
    file.keep()
    file.remove()
    assert SecretFile(file.path, True).read().derived(b"x") == theirs.derived(b"x")
    other.remove()
    assert not file.path.exists()


def test_where_there_is_no_room_for_it_nothing_is_left_and_that_is_said(tmp_path):
    file = SecretFile(tmp_path / "secret", True)
    file.make()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(NoSecret, match=r"can't be written to .*secret \(File too large\): set recycle.secret_file"):
            file.put()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def odd(path: Path, how: str) -> None:
    if how == "a folder":
        path.mkdir()
        return
    (path.parent / "other").write_text("x" * 64)
    (path.parent / "other").chmod(0o600)
    if how == "a link":
        path.symlink_to(path.parent / "other")
        return
    if how == "a pipe":
        os.mkfifo(path, 0o600)
        return
    path.write_text("x" * {"short": 3, "empty": 0}.get(how, 64))
    path.chmod(0o640 if how == "others read it" else 0o600)


@pytest.mark.parametrize("how", ("a folder", "a link", "a pipe", "short", "empty", "others read it"))
def test_what_is_no_secret_is_refused_by_name(tmp_path, how):
    odd(tmp_path / "secret", how)
    with pytest.raises(NoSecret, match=re.escape(str(tmp_path / "secret"))) as refused:
        SecretFile(tmp_path / "secret", True).make()
    assert "xxxxx" not in str(refused.value)


def test_a_folder_of_ours_that_others_can_write_to_is_not_used(tmp_path):
    file = SecretFile(tmp_path / "recycle-0" / "h-1", False)
    file.make()
    file.path.parent.mkdir(mode=0o777)
    file.path.parent.chmod(0o777)
    with pytest.raises(NoSecret, match="is not this user's, or others"):
        file.put()


def test_it_is_not_shown_and_not_written_down():
    shared = "a text that nobody else knows, of 40 letters"
    secret = Secret(shared)
    assert shared not in f"{secret} {secret!r} {vars(Secret).keys()}"
    with pytest.raises(TypeError, match="not written down"):
        pickle.dumps(secret)


ONE, SEVERAL = {"WORLD_SIZE": "4", "LOCAL_SIZE": "4"}, {"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    "section, place, joins, wanted",
    [
        ({}, SEVERAL, False, None),
        ({"secret_file": "/s"}, ONE, False, "/s"),
        ({"secret_file": "/s", "run_dir": "r"}, SEVERAL, False, "/s"),
        ({"run_dir": "r"}, SEVERAL, False, "r/secret"),
        ({"run_dir": "r"}, ONE, False, None),
        ({"run_dir": "no folder"}, {}, True, None),
        ({"secret_file": "/s"}, SEVERAL | {SETTING: "/mine"}, False, "/mine"),
        ({"secret_file": "/s", "tls": None}, ONE, False, "/s"),
    ],
)
def test_the_config_says_where_it_is_before_the_script_runs(tmp_path, section, place, joins, wanted):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"recycle": section}))
    found = with_credentials(place, ["train.py", "--deepspeed_config", str(config)], joins)
    assert found.get(SETTING) == wanted and found | {SETTING: ""} == place | {SETTING: ""}


@pytest.mark.parametrize("joins", (False, True))
def test_a_run_folder_in_the_users_home_has_the_secret_there(tmp_path, monkeypatch, joins):
    """... and no folder ~ is made in the present one."""
    home, config = tmp_path / "home", tmp_path / "ds.json"
    (home / "run").mkdir(parents=True)
    (home / "run" / "secret").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    config.write_text(json.dumps({"recycle": {"run_dir": "~/run"}}))
    found = with_credentials(SEVERAL, ["train.py", "--deepspeed_config", str(config)], joins)
    assert found[SETTING] == str(home / "run" / "secret") and not Path("~").exists()


@pytest.mark.parametrize(
    "section, place, wanted",
    [
        ({"tls": "there"}, {}, {FOLDER: "there"}),
        ({"tls": "there"}, {FOLDER: "mine"}, {FOLDER: "mine"}),
        ({"tls": None}, {}, {}),
    ],
)
def test_the_config_says_too_where_tls_has_its_files(tmp_path, section, place, wanted):
    """What is wrong in them the supervisor says, which reads them."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"recycle": section}))
    assert with_credentials(place, ["train.py", f"--deepspeed_config={config}"]) == wanted


def test_a_setting_that_came_too_late_is_refused():
    check_heeded(None, None, {})
    check_heeded("/s", None, {SETTING: "/s"})
    with pytest.raises(NoSecret, match="--deepspeed_config; or set RECYCLE_SECRET_FILE"):
        check_heeded("/s", None, {})
    check_heeded(None, "/t", {FOLDER: "/t"})
    with pytest.raises(NoSecret, match="--deepspeed_config; or set RECYCLE_TLS"):
        check_heeded(None, "/t", {SETTING: "/s"})


# --- the handshake -------------------------------------------------------------------------------------


def met(caller: Caller, secret: Secret = SECRET, port: Port = Port.CONTROL) -> tuple[Seals, Seals]:
    answerer = Answerer(secret, port, caller.opening[len(MAGIC) :])
    proof, mine = caller.proof(answerer.answer)
    return mine, answerer.seals(proof)


def test_both_ends_have_the_same_keys_and_no_other_connection_has():
    mine, theirs = met(Caller(SECRET, Port.CONTROL))
    for out, into in ((mine.out, theirs.into), (theirs.out, mine.into)):
        seals = [out.of(b"x"), out.of(b"x")]
        assert seals[0] != seals[1] and all(into.fits(b"x", seal) for seal in seals)
    assert mine.datagrams == theirs.datagrams
    again, _ = met(Caller(SECRET, Port.CONTROL))
    assert mine.datagrams != again.datagrams and mine.out.of(b"x") != again.out.of(b"x")


def test_another_secret_another_port_and_ones_own_words_are_nobodys():
    caller = Caller(SECRET, Port.CONTROL)
    for secret, port in ((Secret("another one"), Port.CONTROL), (SECRET, Port.TENSORS)):
        with pytest.raises(Stranger):
            met(caller, secret, port)
    answerer = Answerer(SECRET, Port.CONTROL, caller.opening[len(MAGIC) :])
    proof, _ = caller.proof(answerer.answer)
    for said in (answerer.answer[NONCE:], bytes(PROOF), proof[:-1] + bytes([proof[-1] ^ 1])):
        with pytest.raises(Stranger):
            answerer.seals(said)
    with pytest.raises(Stranger):  # a recorded proof, to the same nonce of the caller's
        Answerer(SECRET, Port.CONTROL, caller.opening[len(MAGIC) :]).seals(proof)
    with pytest.raises(Stranger):  # what it has said itself
        caller.proof(caller.opening[len(MAGIC) :] + proof)


def with_peer(work: Callable[[socket.socket], object], said: bytes, ends: bool = True) -> Stranger | OSError:
    """What ``work`` raises where the other end says so much, and goes."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(said)
        if ends:
            far.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError) as raised:
            work(near)
    return raised.value


@pytest.mark.parametrize(
    "said, why",
    [
        (b"GET / HTTP/1.1", "begins with b'GET ', which can't be understood"),
        (b"", "disconnected before it had proved who it is"),
        (MAGIC + b"half", "disconnected before it had proved who it is, but b'half'"),
        (MAGIC + bytes(NONCE + PROOF), "does not know this job's secret"),
    ],
)
def test_strangers_are_told_apart_by_what_they_do(said, why):
    found = with_peer(lambda near: answer(near, SECRET, Port.CONTROL), said)
    assert isinstance(found, Stranger) and why in str(found)


def test_who_says_nothing_in_time_is_a_stranger_and_one_that_answers_nothing_may_be_busy():
    found = with_peer(lambda near: answer(near, SECRET, Port.CONTROL, 0.05), MAGIC, ends=False)
    assert isinstance(found, Stranger) and "has not proved in time who it is" in str(found)
    found = with_peer(lambda near: call(near, SECRET, Port.CONTROL, 0.05), b"", ends=False)
    assert not isinstance(found, Stranger)
    found = with_peer(lambda near: call(near, SECRET, Port.CONTROL, 0.05), b"HTTP", ends=False)
    assert isinstance(found, Stranger)


# --- the door ------------------------------------------------------------------------------------------


def door(said: list) -> Door:
    return Door(SECRET, Port.TENSORS, "here", lambda *what: said.append(what))


def test_each_address_is_said_once():
    said: list = []
    mine = door(said)
    for number in range(120):
        mine.refuses(("10.0.0.1", number), "no reason")
    mine.refuses(("10.0.0.2", 7), Stranger("it is odd"))
    assert said == [
        ("here a caller at 10.0.0.1:0 was refused: no reason", "10.0.0.1"),
        ("here a caller at 10.0.0.2:7 was refused: it is odd", "10.0.0.2"),
    ]


def test_of_many_addresses_no_more_are_remembered_than_there_is_room_for():
    said: list = []
    mine = door(said)
    for number in range(5 * ADDRESSES):
        mine.refuses((f"10.0.{number // 256}.{number % 256}", 1), "no reason")
    assert len(said) == ADDRESSES + 1 and said[-1][1] == OTHERS


def test_who_keeps_its_connection_open_makes_room_for_the_next(monkeypatch):
    """After its second, and nobody before."""
    now = [0.0]
    monkeypatch.setattr(door_module.time, "monotonic", lambda: now[0])
    mine, pairs = door([]), [socket.socketpair() for _ in range(UNPROVED)]
    for near, _ in pairs:
        assert mine.pause_s() == 0.0
        mine.comes(near)
    assert 0.0 < mine.pause_s() < 1.0
    now[0] = 1.5
    assert mine.pause_s() == 0.0 and pairs[0][1].recv(1) == b""
    pairs[1][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pairs[1][1].recv(1)
    for near, far in pairs:
        near.close()
        far.close()


def test_who_has_proved_it_takes_no_room():
    mine = door([])
    for _ in range(3):
        near, far = socket.socketpair()
        mine.comes(near)
        calling = threading.Thread(target=call, args=(far, SECRET, Port.TENSORS))
        calling.start()
        assert mine.lets_in(near, ("10.0.0.1", 1)) is not None and not mine._unproved
        calling.join(PATIENCE_S)
        near.close()
        far.close()
