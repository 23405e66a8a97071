"""A lost worker comes back beside those that train, catches up, and trains on with them: the losses and weights of the
run without a failure.
"""

from __future__ import annotations

import json
import os
import signal
from typing import NamedTuple

import psutil
import pytest

from tests.support.jobs import SQUARE, WRAPPED, Shape, after_step, difference, held
from tests.support.launching import Launch
from tests.support.returns import HELD, LONG, assert_came_back, comes_back

pytestmark = pytest.mark.plain_too
SPACE = 50  # steps of a cycle


@pytest.mark.some_of(2)
@pytest.mark.parametrize(
    "kill, shape, more",
    [
        pytest.param("kill 1.1 before 1F1.0@5", SQUARE, (), id="the last stage's"),
        pytest.param("kill 1.0 after 0STEP@5", SQUARE, ("recycle.check_replicas=1",), id="the first stage's, compared"),
        pytest.param("kill 1.0 before 0REDUCE@5", SQUARE, ("recycle.undo=inverse",), id="in a sum, inverse undo"),
        pytest.param("kill 2.1 before 1F2.0@5", Shape(3, 2, 2), ("gradient_clipping=0.5",), id="two sources, clipped"),
    ],
)
def test_it_trains_on_with_the_others(launch: Launch, reference, tmp_path, kill, shape, more):
    result = comes_back(launch, tmp_path, kill, *more, shape=shape).finish()
    seat = kill.split()[1]
    assert_came_back(result, reference(f"steps={LONG}", *more, shape=shape), seat)
    served, last = result.of("served"), shape.replicas == 2
    peers = {f"{replica}.{seat[2]}" for replica in range(shape.replicas)} - {seat}
    assert served and {event["seat"] for event in served} <= peers
    assert {"it is the last worker of its stage" in event["held_by"] for event in served} == {last}


def test_where_its_only_source_dies_before_it_sends_anything_it_replays_its_stage(launch: Launch, reference, tmp_path):
    log = "++recycle.log={}", "++recycle.checkpoint.overhead=0.02"
    dies = ("kill 0.1 at serving.told",)
    result = comes_back(launch, tmp_path, "kill 1.1 before 1F1.0@5", *log, later=dies).ended_well()
    assert [event["seat"] for event in result.of("lost")] == ["1.1", "0.1"]
    assert [event["seat"] for event in result.of("replayed")] == ["1.1"], result.output[-6000:]
    assert difference(result, reference(f"steps={LONG}", *log)).tolerated


def test_in_exact_mode_it_has_the_same_bits(launch: Launch, reference, tmp_path):
    more = ("recycle.exact=true",)
    result = comes_back(launch, tmp_path, "kill 1.1 before 1W1.0@5", *more).finish()
    assert_came_back(result, reference(f"steps={LONG}", *more), "1.1", exact=True)


@pytest.mark.plain_too(deepspeed=False)
def test_what_the_script_sets_for_each_step_is_what_the_others_have_applied_it_with(launch, reference, tmp_path):
    more = ("recycle.exact=true", "by_hand=true", "recycle.check_replicas=1")
    result = comes_back(launch, tmp_path, "kill 1.1 before 1W1.0@5", *more).finish()
    assert_came_back(result, reference(f"steps={LONG}", *more), "1.1", exact=True)


def test_automatic_checkpoints_are_made_by_all_at_one_step(launch: Launch, reference, tmp_path):
    """Also of who knows nothing of what the earlier ones have cost: else some wait for a checkpoint that others don't
    begin.
    """
    more = ("++recycle.checkpoint.overhead=0.02",)
    result = comes_back(launch, tmp_path, "kill 1.1 before 1F1.0@5", *more).finish()
    assert_came_back(result, reference(f"steps={LONG}", *more), "1.1")
    back, last = result.of("caught_up")[0]["step"], result.of("checkpoint")[-1]["path"]
    assert int(last.rpartition("step")[2]) > back
    assert not [each for each in result.of("warning") if "all workers have waited" in each["text"]]


class Size(NamedTuple):
    threads: int
    descriptors: int
    resident: int


def size(pid: int) -> Size:
    process = psutil.Process(pid)
    return Size(process.num_threads(), process.num_fds(), process.memory_info().rss)


def settled(now: Size, first: Size) -> bool:
    return now.threads <= first.threads + 1 and now.descriptors <= first.descriptors + 1


@pytest.mark.plain_too(deepspeed=False)
def test_it_leaves_and_returns_many_times_and_nothing_grows(launch: Launch, reference, tmp_path, request):
    """20 times, with --all-kills; a peer's threads, descriptors and memory stay what they were."""
    if not request.config.getoption("--all-kills"):
        pytest.skip("20 returns take minutes: they are tried with --all-kills")
    cycles = 20
    steps = f"steps={SPACE * cycles + 20}"
    gates = [held(tmp_path, SPACE * number + HELD, f"go{number}") for number in range(cycles)]
    run = launch(steps, "recycle.rejoin=always", script=WRAPPED, RECYCLE_TEST_WRAP=json.dumps(gates))
    sizes = []
    for number in range(cycles):
        after_step(run, SPACE * number + 3)
        os.kill([event["pid"] for event in run.of("worker") if event["rank"] == 3][-1], signal.SIGKILL)
        run.hear("newcomer", number + 1)
        (tmp_path / f"go{number}").touch()
        run.hear("rejoined", number + 1)
        peer = next(event["pid"] for event in run.of("worker") if event["rank"] == 1)
        sizes.append(size(peer))
        run.wait_for(lambda: settled(size(peer), sizes[0]), "threads and descriptors of a newcomer's lines to go")
    result = run.ended_well()
    assert len(result.of("rejoined")) == cycles == len(result.of("lost"))
    assert difference(result, reference(steps)).tolerated
    print(sizes)
    assert sizes[-1].resident <= sizes[0].resident + (32 << 20)
