"""What a loss costs: instructions that are executed twice, counted in the traces of real jobs; those with DeepSpeed
have emulated layers.

One worker is killed from outside at a uniformly random instant.  Expected is that nothing runs twice but what the lost
worker had finished: half of its share of the step on average, 4.2% with 3 replicas of 4 stages, 5.6% with 3 of 3.
"""

from __future__ import annotations

import json
import os
import signal
import time
from random import Random

import pytest

from recycle_plugin.core.vocabulary.instruction import COMPUTE
from recycle_plugin.core.vocabulary.span import run_again
from recycle_plugin.observability.trace import read_traces
from tests.support.jobs import WRAPPED, Emulated, after_step, held, in_halves

pytestmark = pytest.mark.plain_too(deepspeed=False)

STEPS, BEGIN, WITHIN = 14, 4, 4  # of the job; the kill falls into the WITHIN steps after step BEGIN
SHAPE = Emulated(3, 3, 4, each_ms=20)
COMPUTED = 3 * SHAPE.stages * SHAPE.replicas * SHAPE.micro_batches  # instructions of a step


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--real-seeds")))


def test_only_what_the_lost_worker_had_finished_is_run_twice(launch, tmp_path, seed):
    random = Random(seed)
    seat = f"{random.randrange(SHAPE.replicas)}.{random.randrange(SHAPE.stages)}"
    wrap = json.dumps(held(tmp_path / "gate", STEPS, "killed"))
    run = launch(
        f"steps={STEPS}",
        "recycle.trace=true",
        "recycle.rejoin=never",
        shape=SHAPE,
        script=WRAPPED,
        RECYCLE_TEST_WRAP=wrap,
    )
    after_step(run, BEGIN)
    commits = [event["time"] for event in run.of("committed")]
    time.sleep(random.uniform(0, WITHIN) * (commits[-1] - commits[-2]))
    os.kill(run.pid_of(seat), signal.SIGKILL)
    (tmp_path / "gate" / "killed").touch()
    result = run.finish()
    assert result.code == 0 and [event["seat"] for event in result.of("lost")] == [seat], result.output[-6000:]

    spans = [span for span in read_traces(result.folder / "trace") if span.instruction.op in COMPUTE]
    committed = result.of("resume")[-1]["committed"]
    finished = {str(span.instruction) for span in spans if str(span.seat) == seat and span.instruction.step > committed}
    twice = {str(span.instruction) for span in run_again(spans)}
    assert len(set(in_halves(spans))) == COMPUTED * STEPS
    print(
        f"seat {seat}: {len(finished)} finished, {len(twice)} run twice, {100 * len(twice) / COMPUTED:.1f}% of a step"
    )
    assert twice <= finished
