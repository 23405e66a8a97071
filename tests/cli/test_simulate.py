"""``recycle simulate``: figures that add up, origins that are named, errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import recycle_plugin
from recycle_plugin.cli import main

DOCS = Path(recycle_plugin.__file__).parent / "docs"

JOB = "simulate --pp 3 --dp 3 --micro-batches 4 --cap 2.0"
SIZED = "simulate --pp 4 --preset gpt3_medium"


def test_figures_add_up(capsys) -> None:
    assert main(f"{JOB} --costs F=20,I=20,W=20,step=5 --mtbf 10m --hours 1 --back 5m --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(transition["lost"]) for transition in found["transitions"]].count(1) == 5
    assert sum(segment["steps"] for segment in found["segments"]) == found["steps"]
    assert found["samples_per_s"] == pytest.approx(found["steps"] * 12 / 3600)
    assert found["transitions_s"] == pytest.approx(sum(transition["cost_s"] for transition in found["transitions"]))
    assert 0.5 < found["of_own"] < 1 < found["of_1f1b"] / found["of_own"]
    assert all(segment["of_1f1b"] <= segment["bound_of_1f1b"] + 1e-9 for segment in found["segments"])
    assert "bench_recovery" in found["machine"]["source"]


def test_the_report_names_origins_and_transitions(capsys) -> None:
    assert main(f"{SIZED} --dp 6 --micro-batches 4 --trace gcp --hours 2".split()) == 0
    said = capsys.readouterr().out
    assert "ANALYTIC" in said and "ASSUMED" in said and "transitions included" in said
    assert said.count("lost ") > 5 and "back " in said


def test_a_lost_worker_is_back_after_a_second_unless_told_otherwise(capsys) -> None:
    job = f"{JOB} --costs F=20,I=20,W=20 --mtbf 20m --hours 0.5 --machine free --json".split()
    changes = {}
    for back in ((), ("--back", "1s"), ("--back", "never")):
        assert main([*job, *back]) == 0
        found = json.loads(capsys.readouterr().out)
        changes[back] = [(round(each["at_s"]), len(each["lost"]), len(each["joined"])) for each in found["transitions"]]
    assert changes[()] == changes["--back", "1s"] == [(1200, 1, 0), (1201, 0, 1)]
    assert changes["--back", "never"] == [(1200, 1, 0)]


def test_with_a_log_a_stage_without_a_worker_costs_a_replay(capsys) -> None:
    job = "simulate --preset gpt3_medium --pp 3 --dp 1 --micro-batches 4 --mtbf 20m --hours 1 --log 100"
    assert main([*job.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["transitions"]
    assert [each["lost"] == each["joined"] for each in found] == [True, True]
    assert all(each["replay_s"] > 1 and each["restart_s"] == pytest.approx(10, abs=0.1) for each in found)
    assert main(job.split()) == 0
    replays = sum(each["replay_s"] for each in found)
    assert f"waiting for a next process 20.0 s, replays {replays:.1f} s" in capsys.readouterr().out


def test_free_changes_cost_only_work(capsys) -> None:
    assert main(f"{JOB} --costs F=20,I=20,W=20 --mtbf 20m --hours 1 --machine free --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(transition["detection_s"] == transition["regroup_s"] == 0 for transition in found["transitions"])


def test_a_kill_is_drawn_traced_and_accounted_for(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    job = [*JOB.split(), "--costs", "F=20,I=20,W=20,step=5", "--fault", "kill 1.2 before 2I1.1@1"]
    assert main([*job, "--png", str(tmp_path / "x.png")]) == 0
    said = capsys.readouterr().out
    assert "lost 1.2 at" in said and "behind step 0" in said and "F1.0" in said
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert main([*job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["losses"][0]["seats"] == ["1.2"] and sorted(found["commits"]) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "fault", re.findall(r'`"(kill .*?)"`', (DOCS / "planning.md").read_text()), ids=lambda text: text.replace(" ", "-")
)
def test_each_fault_of_the_documents_strikes(capsys, fault: str) -> None:
    assert main([*JOB.split(), "--costs", "F=20,I=20,W=20,step=5", "--fault", fault, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"][0]["seats"] == ["1.2"]


def test_what_is_run_again_stands_beside_what_step_restart_would(capsys) -> None:
    job = [*JOB.split(), "--costs", "F=20,I=20,W=20,step=5", "--fault", "kill 1.2 before 2I1.3@1", "--restart"]
    assert main([*job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (lost,), (restarted,) = found["losses"], found["restart"]["losses"]
    assert 0 < lost["redone_share"] < 1 / 12 < restarted["redone_share"]
    assert found["commits"]["2"] < found["restart"]["commits"]["2"]
    assert main(job) == 0
    said = capsys.readouterr().out
    assert (
        f"run again, of a step's compute: {lost['redone_share']:.1%}; {restarted['redone_share']:.1%} where an "
        "interrupted step starts anew" in said
    )


@pytest.mark.parametrize(
    "more, says",
    [
        ("--mtbf 10x", "90s, 30m or 6h"),
        ("--mtbf 10m --lost 1.2", "write losses into a trace"),
        ("--mtbf 10m --machine moon", "one of local, cluster, free"),
        ("--mtbf 10m --hours 0", "more than 0"),
        ("--mtbf 1m --hours 5 --back never", "without a log (--log) the job ends there"),
        ("--mtbf 10m --log 0", "at least 1 step"),
        ("--fault nonsense --log 9", "plays no replays"),
        ("--mtbf 10m --png x.png", "go with --fault"),
        ("--mtbf 10m --restart", "go with --fault"),
        ("--fault nonsense", "is no fault"),
        ("--fault", "never strikes"),
        ("--trace gcp", "24 workers at hour 0"),
        ("--trace /no/such/file", "No such file"),
        ("--mtbf 10m --no-reroute", "reroute"),
    ],
)
def test_errors_are_one_line(capsys, more: str, says: str) -> None:
    arguments = ["--fault", "kill 1.2 before 2I1.1@9"] if more == "--fault" else more.split()
    assert main(JOB.split() + arguments) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("recycle: ") and said.count("\n") == 1
