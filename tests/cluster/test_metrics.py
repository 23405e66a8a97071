"""A real job's metrics: what a scrape says is what its log says, and a server that can't listen costs the job
nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recycle_plugin.launch import free_port
from tests.support.cluster import Run
from tests.support.expressions import expressions
from tests.support.jobs import PLAIN, STEPS, after_step, assert_same_training, hold
from tests.support.launching import Launch

KILLED_AT = 8
PATIENCE_S = 60.0


@pytest.fixture
def vehicle():
    return PLAIN


@contextmanager
def held_with_a_loss(launch: Launch, folder: Path) -> Iterator[Run]:
    """A job that serves metrics, has lost a worker and gone on, and stands still before its end; goes on to that when
    this is left.
    """
    run = launch("recycle.metrics=127.0.0.1:0", RECYCLE_TEST_WRAP=json.dumps(hold(folder)))
    after_step(run, KILLED_AT)
    os.kill(run.pids()[run_rank(run, "0.1")], signal.SIGKILL)
    after_step(run, STEPS - 4)  # the gate is at the one after the next
    yield run
    (folder / "go").touch()


def run_rank(run: Run, seat: str) -> int:
    return run.of("start")[0]["seats"][seat]


def of(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def scrape(events: list[dict]) -> dict[tuple, float]:
    (said,) = of(events, "metrics")
    with urllib.request.urlopen(said["url"], timeout=PATIENCE_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }


def at_rest(run: Run) -> tuple[list[dict], dict[tuple, float], list[dict]]:
    """Events and a scrape between which nothing has happened, but for the clock; and the events once more."""
    return run.wait_for(
        lambda: (found := (run.events(), scrape(run.events()), run.events()))[0] == found[2] and found,
        "scrape between two events",
    )


def test_a_scrape_says_what_the_log_says(launch, reference, tmp_path):
    with held_with_a_loss(launch, tmp_path) as run:
        events, found, _ = at_rest(run)
    commits, (start,), (lost,) = of(events, "committed"), of(events, "start"), of(events, "lost")
    resumed = of(events, "resume")[-1]
    assert found["recycle_step",] == commits[-1]["step"] >= STEPS - 4
    assert [found["recycle_workers", state] for state in ("live", "lost", "left")] == [3, 1, 0]
    assert [found["recycle_stage_live_workers", stage] for stage in "01"] == [2, 1]
    causes = Counter(event["cause"] for event in of(events, "lost"))
    assert (
        causes
        == {"died": 1}
        == {name[1]: value for name, value in found.items() if name[0] == "recycle_failures_total" and value}
    )
    after = next(event["time"] for event in commits if event["step"] == resumed["committed"] + 1)
    phases = {"notice": 0.0, "regroup": resumed["time"] - lost["seen_at"], "finish": after - resumed["time"]}
    assert {phase: found["recycle_recovery_seconds_sum", phase] for phase in phases} == pytest.approx(phases, abs=1e-5)
    assert found["recycle_redone_seconds_total",] == pytest.approx(
        sum(event["redone_s"] for event in commits), abs=1e-6
    )
    assert [found["recycle_bubble_ratio", stage] for stage in "01"] == commits[-1]["stage_bubbles"]
    assert found["recycle_plan_bound_ratio",] == resumed["period_us"] / resumed["bound_us"] >= 1
    assert found["recycle_predicted_throughput_ratio",] == resumed["throughput"] < 1
    assert found["recycle_samples_total",] == len(commits) * start["job"]["batch"] > 0
    assert found["recycle_loss",] == of(events, "loss")[-1]["loss"]
    assert found["recycle_ettr_ratio",] > 0 and math.isfinite(found["recycle_ettr_ratio",])
    assert_same_training(run.finish(), reference(), {"0.1"})


@pytest.mark.parametrize("launcher", ["plain", "tasks"])
def test_the_url_is_said_and_gone_with_the_job(launch, tmp_path, launcher):
    """Of the launcher for one host, which is the coordinator's process too, and of rank 0's guard, which has one for
    it.
    """
    run = launch("recycle.metrics=127.0.0.1:0", launcher=launcher, RECYCLE_TEST_WRAP=json.dumps(hold(tmp_path)))
    after_step(run, 4)
    (said,), found = of(run.events(), "metrics"), scrape(run.events())
    assert 4 <= found["recycle_step",] < STEPS and found["recycle_workers", "live"] == 4
    (tmp_path / "go").touch()
    result = run.finish()
    assert result.code == 0 and f"metrics: for Prometheus at {said['url']}" in result.output
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(said["url"], timeout=PATIENCE_S)


def test_a_port_that_is_taken_costs_nothing(launch, reference):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = launch(f"recycle.metrics=127.0.0.1:{(port := taken.getsockname()[1])}").finish()
    assert_same_training(result, reference())
    said = [event["text"] for event in result.of("warning") if "metrics" in event["text"]]
    assert len(said) == 1 and f"can't listen on 127.0.0.1:{port} (Address already in use)" in said[0]
    assert not result.of("metrics")


# --- with Prometheus itself ----------------------------------------------------------------------------------


@contextmanager
def prometheus(program: str, target: str, folder: Path) -> Iterator[str]:
    """Scrapes ``target`` ten times a second; where it answers."""
    config, address = folder / "prometheus.yml", f"127.0.0.1:{free_port()}"
    jobs = [
        {
            "job_name": "training",
            "scrape_interval": "100ms",
            "scrape_timeout": "100ms",
            "static_configs": [{"targets": [target]}],
        }
    ]
    config.write_text(json.dumps({"scrape_configs": jobs}))  # JSON is YAML
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def asked(at: str, expression: str) -> list[dict]:
    """What Prometheus answers; nothing while it is not there yet."""
    try:
        with urllib.request.urlopen(
            f"{at}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=PATIENCE_S
        ) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it is starting
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []


def test_prometheus_scrapes_a_job_and_answers_the_boards_questions(launch, request, tmp_path):
    """Also that the board's expressions are PromQL, and that each finds something of a job that has lost a worker."""
    if (name := request.config.getoption("--prometheus")) is None:
        pytest.skip("needs --prometheus PATH_OR_NAME")
    program = shutil.which(name)
    assert program, f"--prometheus {name}: no such program"
    with held_with_a_loss(launch, tmp_path) as run:
        events, found, _ = at_rest(run)
        target = of(events, "metrics")[0]["url"].removeprefix("http://").partition("/")[0]
        with prometheus(program, target, tmp_path) as at:
            run.wait_for(
                lambda: asked(at, "count_over_time(recycle_step[1m]) > 2"), "three scrapes of recycle_step", PATIENCE_S
            )
            for key in (("recycle_step",), ("recycle_samples_total",), ("recycle_plan_bound_ratio",)):
                (answer,) = asked(at, key[0])
                assert float(answer["value"][1]) == found[key]
            (answer,) = asked(at, 'recycle_failures_total{cause="died"}')
            assert answer["value"][1] == "1"
            nothing = [text for text in map(filled, expressions()) if not asked(at, text)]
            assert nothing == [filled(text) for text in expressions() if "suspicions" in text]  # nobody was suspected
    assert run.finish().code == 0


def filled(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
