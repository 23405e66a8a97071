"""SIGTERM to workers at random moments, as from a cloud or a scheduler that takes a machine away: each leaves as
planned, whatever is under way then, and nothing is lost.
"""

from __future__ import annotations

import os
import signal
import time
from random import Random

import pytest

from recycle_plugin.cli import main
from recycle_plugin.core.vocabulary.ids import Seat
from tests.support.cluster import Run
from tests.support.jobs import LOSS_TOLERANCE, Shape, after_step, assert_same_training
from tests.support.returns import LONG, comes_back

THREE = Shape(replicas=3)
LONGEST_S = 0.6  # from one notice to the next


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "notices" in metafunc.fixturenames:
        metafunc.parametrize("notices", (100 if metafunc.config.getoption("--all-kills") else 6,))


def last(run: Run, rank: int, *kinds: str) -> str:
    said = (event["event"] for event in reversed(run.events()) if event["event"] in kinds and event["rank"] == rank)
    return next(said, "")


def may_go(run: Run, seats: dict[str, int]) -> list[str]:
    """Members whose stages have others."""
    members = [
        seat for seat, rank in seats.items() if last(run, rank, "leaving", "left", "rejoined") in ("", "rejoined")
    ]
    stages = [Seat.parse(seat).stage for seat in members]
    return [seat for seat, stage in zip(members, stages) if stages.count(stage) > 1]


@pytest.mark.plain_too
def test_each_notice_at_a_random_moment_is_a_planned_leave(launch, reference, notices, capsys):
    """Who has left is admitted again, and comes back while others get their notices, and while checkpoints are
    written.
    """
    random = Random(notices)
    run = launch("steps=100000", "recycle.checkpoint={every: 3}", shape=THREE)
    after_step(run, 2)
    (start,) = run.of("start")
    given: list[str] = []
    while len(given) < notices:
        time.sleep(random.uniform(0, LONGEST_S))  # the moment
        seat = random.choice(run.wait_for(lambda: may_go(run, start["seats"]), "a member that may go"))
        rank = start["seats"][seat]
        os.kill(run.pids()[rank], signal.SIGTERM)
        given.append(seat)
        run.wait_for(lambda: last(run, rank, "left", "rejoined") == "left", f"leave of {seat}")
        assert main(["admit", seat, "--run", str(run.folder)]) == 0, capsys.readouterr().out
    os.kill(run.launcher.pid, signal.SIGTERM)
    result = run.finish()
    assert result.of("terminate") and not result.of("lost") and not result.of("error"), result.output[-6000:]
    assert [event["seat"] for event in result.of("leaving")] == given
    steps = [event["step"] for event in result.of("committed")]
    assert steps == [*range(1, len(steps) + 1)], "none is lost, and none is made twice"
    losses = {event["step"]: event["loss"] for event in result.of("loss")}
    whole = reference(f"steps={steps[-1]}", shape=THREE).losses
    assert [losses[step] for step in steps] == pytest.approx(whole, abs=LOSS_TOLERANCE)


@pytest.mark.plain_too(deepspeed=False)
def test_a_newcomer_that_others_may_count_on_leaves_as_planned(launch, reference, tmp_path):
    """The coordinator has heard that it has the state, and may let it in at any moment."""
    run = comes_back(launch, tmp_path, "kill 1.1 before 1F1.0@6")
    (said,) = run.hear("caught_up")
    os.kill(run.pids()[said["rank"]], signal.SIGTERM)
    result = run.finish()
    assert_same_training(result, reference(f"steps={LONG}"), lost={"1.1"}, left={"1.1"})
    assert len(result.of("lost")) == 1 and [event["seat"] for event in result.of("leaving")] == ["1.1"]
