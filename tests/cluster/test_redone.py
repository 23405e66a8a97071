"""What a loss costs: instructions that are executed twice, counted in the traces of real jobs of emulated layers.

One worker is killed from outside at a uniformly random instant.  Expected is that nothing runs twice but what the lost worker had
finished: half of its share of the step on average, 4.2% with 3 replicas of 4 stages, 5.6% with 3 of 3.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from random import Random

import pytest

from recycle_plugin.core.executor import run_again
from recycle_plugin.core.instruction import COMPUTE
from recycle_plugin.runtime.trace import read_traces
from tests.support.jobs import Shape, after_step

EACH_MS = 20  # F, I and W
STEPS, BEGIN, WITHIN = 14, 4, 4  # of the job; the kill falls into the WITHIN steps after step BEGIN


@dataclass(frozen=True)
class Emulated(Shape):
    """Layers that take a stated time, so that two cores are enough for many workers."""

    def overrides(self) -> list[str]:
        times = [f"{prefix}.{name}_ms={EACH_MS}" for prefix in ("model", "++recycle.costs") for name in ("forward", "input", "weight")]
        shape = [f"topology.{name}={getattr(self, name)}" for name in ("replicas", "stages", "micro_batches")]
        return ["model=emulated", "optimizer=sgd", *times, *shape, f"steps={STEPS}", "recycle.enabled=true", "recycle.trace=true"]

    @property
    def compute(self) -> int:
        """Instructions of a step."""
        return 3 * self.stages * self.replicas * self.micro_batches


SHAPE = Emulated(3, 3, 4)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--real-seeds")))


def test_only_what_the_lost_worker_had_finished_is_run_twice(launch, seed):
    random = Random(seed)
    seat = f"{random.randrange(SHAPE.replicas)}.{random.randrange(SHAPE.stages)}"
    run = launch(shape=SHAPE)
    after_step(run, BEGIN)
    commits = [event["time"] for event in run.events() if event["event"] == "committed"]
    time.sleep(random.uniform(0, WITHIN) * (commits[-1] - commits[-2]))
    (start,) = [event for event in run.events() if event["event"] == "start"]
    os.kill(run.pids()[start["seats"][seat]], signal.SIGKILL)
    result = run.finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == [seat], result.output[-6000:]

    spans = [span for span in read_traces(result.folder / "trace") if span.instruction.op in COMPUTE]
    committed = result.of("resume")[-1]["committed"]
    finished = {str(span.instruction) for span in spans if str(span.seat) == seat and span.instruction.step > committed}
    twice = {str(span.instruction) for span in run_again(spans)}
    assert len({str(span.instruction) for span in spans}) == SHAPE.compute * STEPS
    print(f"seat {seat}: {len(finished)} finished, {len(twice)} run twice, {100 * len(twice) / SHAPE.compute:.1f}% of a step")
    assert twice <= finished
