"""Seats that two processes hold together, each with a half of every layer: they go together, and come back together."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from recycle_plugin import cli
from tests.support.cluster import ForkServer, Result
from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, Shape
from tests.support.launching import launching

SCRIPT = "tests/jobs/seats.py"
STEPS, HELD = 40, 14
NOTHING_ELSE = {
    "steps": STEPS,
    "stages": 1,
    "kills": [],
    "held": 0,
    "save": 0,
    "load": False,
    "clip": 0.0,
    "split": False,
}


@pytest.fixture
def vehicle():
    return PLAIN


def started(launch, folder: Path, **more: Any) -> Result:
    """2 replicas of one stage of two processes; who is killed is waited for."""
    job = NOTHING_ELSE | more
    if job["kills"]:
        job["held"] = HELD
    job["folder"] = str(folder)
    run = launch(shape=Shape(2, 2), script=SCRIPT, RECYCLE_TEST_SEATS=json.dumps(job))
    if job["kills"]:
        run.hear("newcomer", 2)
        (folder / "go").touch()
    return run.finish()


@pytest.fixture(scope="module")
def calm(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Result]:
    @cache
    def run() -> Result:
        folder = tmp_path_factory.mktemp("calm")
        with launching(server, folder, vehicle=PLAIN) as launch:
            result = started(launch, folder / "run0")
        assert result.code == 0 and not result.of("lost"), result.output[-6000:]
        return result

    return run


def weights(result: Result, rank: int) -> list[float]:
    found = result.records[rank]["weights"]
    return [value for name in sorted(found) for value in found[name]]


def same_training(result: Result, calm: Result) -> None:
    """The same losses, and of each half of each seat the same weights."""
    assert {len(each["losses"]) for each in result.records.values()} == {STEPS} and len(result.records) == 4
    for rank, each in result.records.items():
        assert each["losses"] == pytest.approx(calm.records[rank]["losses"], abs=5e-6)
        assert weights(result, rank) == pytest.approx(weights(calm, rank), abs=5e-6)
    halves = [weights(result, rank) for rank in (0, 1)]
    assert halves[0] != pytest.approx(halves[1], abs=1e-2), "each has weights of its own"


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param([3, 6, "between"], id="between two steps"),
        pytest.param([2, 6, "forward"], id="while the other one waits for it in a forward"),
        pytest.param([1, 6, "backward"], id="while the other one waits for it in a backward"),
    ],
)
def test_a_seat_goes_whole_and_comes_back_whole(launch, calm, tmp_path, kill):
    result = started(launch, tmp_path / "run0", kills=[kill])
    assert result.code == 0, result.output[-6000:]
    seat, ranks = f"{kill[0] // 2}.0", [kill[0] - kill[0] % 2, kill[0] - kill[0] % 2 + 1]
    for kind in ("lost", "restart", "newcomer", "caught_up", "rejoined"):
        assert sorted(event["rank"] for event in result.of(kind)) == ranks, kind
    assert {event["seat"] for event in result.of("lost")} == {seat}
    assert {event["in_vain"] for event in result.of("restart")} == {0}
    first, second = (event["step"] for event in result.of("rejoined"))
    assert HELD < first == second < STEPS
    assert {rank: each["incarnation"] for rank, each in result.records.items()} == {
        rank: int(rank in ranks) for rank in range(4)
    }
    assert not result.of("error") and not result.of("warning"), result.output[-6000:]
    assert cli.main(["status", str(tmp_path / "run0")]) == cli.main(["report", str(tmp_path / "run0")]) == 0
    same_training(result, calm())


def test_a_seat_whose_processes_are_on_two_hosts(plain_server, calm, four, tmp_path):
    with launching(plain_server, tmp_path, partial(HostsRun, four), PLAIN) as launch:
        result = started(launch, tmp_path / "run0", kills=[[2, 6, "forward"]])
    assert result.code == 0 and not result.of("error"), result.output[-6000:]
    assert sorted(event["rank"] for event in result.of("rejoined")) == [2, 3]
    same_training(result, calm())


def test_a_checkpoint_has_a_file_of_each_half_and_is_gone_on_from(launch, calm, tmp_path):
    first = started(launch, tmp_path / "run0", save=10, steps=12)
    assert first.code == 0, first.output[-6000:]
    files = {path.name for path in (tmp_path / "saved" / "global_step10").iterdir()}
    assert files == {"stage_00.pt", "stage_00_shard_1.pt"}
    second = started(launch, tmp_path / "run1", load=True)
    assert second.code == 0, second.output[-6000:]
    for rank, each in second.records.items():
        assert each["losses"] == pytest.approx(calm().records[rank]["losses"][10:], abs=5e-6)
        assert weights(second, rank) == pytest.approx(weights(calm(), rank), abs=5e-6)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"clip": 1.0}, "clip=1.0 with shards=2: the plugin can't tell which parameters are parts"),
        ({"split": True}, "recycle.split_backward with shards=2: a layer's workers add up in its backward"),
        ({"stages": 2}, "4 workers for 2 stages of 2 shards: start a multiple of 4, and at least 8"),
    ],
)
def test_what_such_a_job_can_not_do_is_said_in_a_line(launch, tmp_path, more, said):
    result = started(launch, tmp_path / "run0", **more)
    assert result.code != 0 and said in result.output
