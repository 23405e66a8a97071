"""A whole job in TLS, under DeepSpeed's launcher: its supervisors, workers and a newcomer, and somebody outside."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from recycle_plugin.authentication.handshake import MAGIC
from recycle_plugin.authentication.tls import KEY, OWN
from recycle_plugin.cli import main
from recycle_plugin.lab.runs import environment
from recycle_plugin.launch import free_port
from tests.support.certificates import authority, changed, files
from tests.support.cluster import Run
from tests.support.jobs import WRAPPED, faults, held
from tests.support.returns import HELD, LONG, assert_came_back
from tests.support.strangers import CONTROL, PATIENCE_S, forged, listeners, told

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
HANGUP_S = 5.0  # until a port is one of Gloo's, which does not hang up


def in_tls(host: str, port: int, said: bytes, context: ssl.SSLContext) -> None:
    """Say something there in TLS, however far that gets."""
    with suppress(OSError), socket.create_connection((host, port), PATIENCE_S) as raw:
        raw.settimeout(HANGUP_S)
        with context.wrap_socket(raw) as stranger:
            stranger.sendall(said)
            stranger.recv(1)


def somebodys(certificate: bool) -> ssl.SSLContext:
    """Of who knows nothing but the job's ca, and has a certificate of another one, or none."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(authority()[0])
    if certificate:
        folder = files("stranger", "other")
        made.load_cert_chain(folder / OWN, folder / KEY)
    return made


def attack(run: Run) -> None:
    """Everything that is listened at but torch's, without TLS, without a certificate, and with a wrong one."""
    for said in CONTROL.values():
        told(run.port, said)
    ports = [("127.0.0.1", run.port), *(place for pid in run.pids().values() for place in listeners(pid))]
    said = MAGIC + forged(LONG - 1)
    with ThreadPoolExecutor(32) as at_once:
        each = [(*place, said, context) for place in ports for context in map(somebodys, (False, True))]
        [*at_once.map(lambda given: in_tls(*given), each)]


@pytest.mark.real_launcher
@pytest.mark.plain_too(deepspeed=False)
def test_a_killed_worker_comes_back_and_the_weights_are_those_without_tls(launch, reference, tmp_path, capsys):
    """To the bit; who has no certificate is named at each port, and changes nothing; operators have their way in."""
    own, more = files("alpha"), ("recycle.exact=true",)
    run = launch(
        f"steps={LONG}",
        "recycle.rejoin=always",
        faults("kill 1.1 before 1W1.0@5"),
        f"recycle.tls={own}",
        *more,
        script=WRAPPED,
        RECYCLE_TEST_WRAP=json.dumps([held(tmp_path, HELD, "go")]),
        RECYCLE_TLS=str(own),
    )
    run.hear("newcomer")
    attack(run)
    assert main(["admit", "0.0", "--run", str(run.folder)]) == 1 and "0.0" in capsys.readouterr().out
    (tmp_path / "go").touch()
    result, whole = run.finish(), reference(f"steps={LONG}", *more)
    assert_came_back(result, whole, "1.1", exact=True)
    first = {event["text"].partition(" a caller at ")[0]: event["text"] for event in reversed(result.of("stranger"))}
    assert {"at the coordinator", *(f"at worker {rank}" for rank in (0, 1, 2))} <= first.keys(), first
    assert "it does not speak TLS 1.3, which is set here" in first["at the coordinator"], first
    assert "Traceback" not in result.output, result.output[-6000:]


@pytest.mark.parametrize(
    "options, place", [(("--workers", "2"), {}), ((), ONE_RANK)], ids=("one host's", "a launcher's")
)
def test_the_config_is_heeded_before_the_script_runs(tmp_path, options, place):
    """Here it names a key that is another certificate's: nothing is listened at, and one line says so."""
    wrong = changed(files("alpha"), key=files("beta") / KEY)
    config, script = tmp_path / "ds_config.json", tmp_path / "train.py"
    config.write_text(json.dumps({"recycle": {"tls": str(wrong)}}))
    script.write_text("raise SystemExit('it was run')")
    done = subprocess.run(
        [sys.executable, "-m", "recycle_plugin.launch", *options, str(script), "--deepspeed_config", str(config)],
        env=environment(MASTER_PORT=str(free_port()), **place),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"recycle: error: recycle.tls: {wrong / KEY} does not belong to {wrong / OWN}; put the private key of tls.crt "
        "there, in PEM\n"
    )
