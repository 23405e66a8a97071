"""``scripts/check_cluster``: its rows on one host and on two, and what each says where something is wrong."""

from __future__ import annotations

import json
import os
import signal

import pytest

from recycle_plugin.lab.checks import cluster
from recycle_plugin.lab.checks.measured import pairs
from recycle_plugin.lab.checks.rows import Row
from recycle_plugin.lab.runs import environment
from recycle_plugin.launch import free_port
from recycle_plugin.settings.schema import Settings
from tests.support.hosts import NAMES, NoHosts, hosts
from tests.support.launchers import install

MEASURED = {"torch": "2.13.0", "python": "3.12.3"}


def worker(rank: int, host: str, seat: str, **versions: str) -> dict:
    return {
        "rank": rank,
        "seat": seat,
        "host": host,
        "cores": 2,
        "versions": {**MEASURED, **versions},
        "device": "cpu",
    }


def square(*names: str) -> list[dict]:
    """Four workers on these hosts, by rank."""
    return [worker(rank, host, seat) for rank, (host, seat) in enumerate(zip(names, ("0.0", "1.0", "0.1", "1.1")))]


@pytest.fixture
def one_kill(monkeypatch) -> None:
    monkeypatch.setattr(cluster, "MOMENTS", ["REDUCE"])


@pytest.mark.processes
def test_one_host_passes_and_says_so(tmp_path, monkeypatch, plain_server, one_kill, capsys):
    monkeypatch.setenv("RECYCLE_FORK_SERVER", plain_server.path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"recycle": {"enabled": True, "heartbeat_timeout_s": 10, "undo": "inverse"}}))
    assert cluster.main(["--out", str(tmp_path / "out"), "--config", str(config)]) == 0, capsys.readouterr().out
    said, data = capsys.readouterr().out, json.loads((tmp_path / "out" / "check.json").read_text())
    rows = {row["name"]: row for row in data["rows"]}
    assert {"a job without a failure", "versions", "clocks", "placement", "kill: REDUCE"} < set(rows)
    assert rows["kill: REDUCE"]["passed"] and rows["kill: REDUCE"]["figures"]["difference"] <= 5e-6
    assert rows["heartbeat_timeout_s"]["text"].startswith("10 s, the worst round trip is 0.")
    (link,) = [row for name, row in rows.items() if name.startswith("link: ")]
    assert link["figures"]["gb_s"] > 0 and 0 < link["figures"]["round_trip_ms"] <= link["figures"]["worst_ms"]
    assert "What it survives" in said and "Predicted slowdown" in said and "send back" in said
    assert (tmp_path / "out" / "check.txt").read_text() in said + "\n"


@pytest.mark.processes
@pytest.mark.all_kills
def test_two_hosts_under_pdsh(tmp_path, monkeypatch, server, one_kill, capsys):
    """By DeepSpeed's own command; pdsh is a stand-in, and the hosts are network namespaces."""
    hostfile, forwarded = tmp_path / "hostfile", tmp_path / "deepspeed_env"
    hostfile.write_text("".join(f"{name} slots=2\n" for name in NAMES))
    own = environment()
    forwarded.write_text("".join(f"{name}={own[name]}\n" for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR")))
    try:
        with hosts() as made:
            address, port = made.address(NAMES[0]), str(free_port())
            variables = {
                "RECYCLE_FORK_SERVER": server.path,
                "RECYCLE_TEST_HOSTS": json.dumps({name: str(made.pid(name)) for name in NAMES}),
                "DS_ENV_FILE": str(forwarded),
                "PATH": install(tmp_path / "bin") + os.pathsep + own["PATH"],
            }
            for name, value in {**own, **variables}.items():
                monkeypatch.setenv(name, value)
            launcher = ["deepspeed", "--launcher", "pdsh", "--hostfile", str(hostfile), "--no_ssh_check"]
            launcher += ["--master_addr", address, "--master_port", port, "--module", "recycle_plugin.launch"]
            code = cluster.main(["--out", str(tmp_path / "out"), "--", *launcher])
    except NoHosts as error:
        pytest.skip(f"no network namespaces here: {error}")
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "check.json").read_text())["rows"]}
    failed = {name for name, row in rows.items() if row["passed"] is False}
    assert code == 1 and failed == {"placement"}, capsys.readouterr().out  # each stage is on one host
    assert "alpha holds every replica of stage 0" in rows["placement"]["text"]
    assert rows["link: alpha - beta"]["figures"]["gb_s"] > 0 and {"device: alpha", "device: beta"} < set(rows)


def test_a_job_that_does_not_start_is_one_row(tmp_path, monkeypatch, capsys):
    """Two workers are too few for two stages of which one may be lost."""
    monkeypatch.setattr(cluster, "ALONE", (*cluster.ALONE[:-1], "2"))
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    assert cluster.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAIL  a job without a failure" in said and "2 workers for 2 stages: start a multiple of 2" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "given, said",
    [
        (["--", "nowhere-to-be-found"], "nowhere-to-be-found is not in PATH here: put the command that starts your"),
        (["--", "true"], "true does not name recycle_plugin.launch, without which a job survives nothing"),
        (["--seconds", "0"], "--seconds 0: write a number above 0"),
        (["--seconds", "nan"], "--seconds nan: write"),
        (["--config", "/nowhere.json"], "/nowhere.json: No such file or directory; give the path of DeepSpeed"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, given, said):
    assert cluster.main(["--out", str(tmp_path), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"check_cluster: {said}")


def test_a_table_that_cannot_be_written_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cluster, "tried", lambda *_: ([Row("a job without a failure", True, "20 steps")], []))
    (tmp_path / "check.txt").mkdir()
    assert cluster.main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Is a directory" in line and "check.txt" in line


def test_a_wrong_setting_is_one_line(tmp_path, capsys):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"recycle": {"enabled": True, "heartbeat_timeout_s": "long"}}))
    assert cluster.main(["--out", str(tmp_path / "out"), "--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "heartbeat_timeout_s" in line and not (tmp_path / "out").exists()


def test_a_job_that_others_wrote_nothing_of_is_one_row(tmp_path, monkeypatch, capsys):
    """As where its hosts have a folder of that name of their own."""
    monkeypatch.setattr(cluster, "checked", lambda launcher: ["true", "recycle_plugin"])
    assert cluster.main(["--out", str(tmp_path)]) == 1
    assert "give --out a folder that all hosts and this one share" in capsys.readouterr().out


def test_an_interruption_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "tried", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert cluster.main(["--out", str(tmp_path)]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check_cluster: interrupted")


# --- rows --------------------------------------------------------------------------------------------


def test_hosts_with_other_releases_are_named():
    alike, other = square("a", "a", "b", "b"), square("a", "a", "b", "b")
    other[3]["versions"]["torch"] = "2.6.0"
    assert cluster.versions(alike).passed and "torch 2.13.0" in cluster.versions(alike).text
    row = cluster.versions(other)
    assert row.passed is False and "torch is 2.13.0 on a, b and 2.6.0 on b; install the same" in row.said


@pytest.mark.parametrize("apart, passed", [(-999, True), (1001, False), (-1001, False)])
def test_clocks_that_differ_fail(apart, passed):
    links = {"0-1": {"clock_ms": 0.1}, "0-2": {"clock_ms": apart}}
    assert cluster.clocks({"links": links}).passed is passed


@pytest.mark.parametrize("worst_ms, passed", [(1.0, True), (400.0, False)])
def test_a_deadline_that_is_too_short_for_what_was_measured_fails(worst_ms, passed):
    settings = Settings.from_section({"enabled": True})
    assert cluster.deadlines(settings, {"links": {"0-1": {"worst_ms": worst_ms}}}).passed is passed


def test_the_placement_that_was_found_is_judged(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "recycle": {"enabled": True}}))
    row, said = cluster.placed(square("a", "a", "b", "b"), config)
    assert row.passed is False and "a holds every replica of stage 0; b holds every replica of stage 1" in row.text
    row, said = cluster.placed(square("a", "b", "a", "b"), config)
    assert row.passed and any("host b" in line for line in said)


def test_a_few_pairs_of_many_hosts_are_measured():
    assert pairs(["a"] * 4) == [(0, 1)]
    assert pairs(["a", "a", "b", "b"]) == [(0, 2)]
    assert pairs(["a", "b", "a", "b", "c"]) == [(0, 1), (0, 4), (1, 4)]
    many = pairs([f"host{number // 2}" for number in range(40)])
    assert (0, 38) in many and (36, 38) in many and (2, 38) not in many and len(many) == 2 * 19 - 1
