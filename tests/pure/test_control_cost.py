"""What a message or a tick costs the coordinator does not grow with the workers that it is not about."""

from __future__ import annotations

import random

import pytest

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS, Activity
from recycle_plugin.core.messages.from_workers import (
    Heartbeat,
    SupervisorHeartbeat,
)
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.settings.schema import Settings
from tests.support.control_cost import STAGES, instructions, job, of_step

DEADLINES = Settings().deadlines


@pytest.mark.parametrize("place", range(5), ids=[type(each).__name__ for each in of_step(0, 2, 2)])
def test_a_message_of_a_step_looks_at_nobody_but_who_says_it(place):
    def costs(replicas: int) -> int:
        membership, message = job(replicas), list(of_step(STAGES, replicas, 2))[place]
        return instructions(lambda: membership.receive(message, 1.0))

    assert costs(3) == costs(16)


def test_a_tick_looks_at_nobody_while_all_go_on():
    def costs(replicas: int) -> int:
        membership = job(replicas)
        return instructions(lambda: membership.tick(1.0 + TICK_S))

    assert costs(3) == costs(16)


@pytest.mark.parametrize("seed", range(20))
def test_who_is_suspect_is_seen_as_soon_as_by_a_look_at_all_in_each_tick(seed):
    def everybody_looked_at() -> FailureDetector:
        looks = FailureDetector(DEADLINES)
        looks.admit(workers)
        return looks

    draw, workers = random.Random(seed), [WorkerId(rank) for rank in range(5)]
    lazy, eager = everybody_looked_at(), everybody_looked_at()
    now, suspected = 0.0, 0
    quiet = dict.fromkeys(workers, 0.0)
    for step in range(2000):
        now += draw.choice([TICK_S, TICK_S, TICK_S, 3.0])
        eager._quiet_until = 0.0  # so that it looks at all
        found = lazy.tick(now)
        assert found == eager.tick(now) and list(found) == sorted(found)
        assert lazy.standstill_s == eager.standstill_s
        suspected += len(found)
        for worker in workers:
            if draw.random() < 0.01:
                quiet[worker] = now + draw.choice([4.0, 15.0, 60.0])
            for detector in (lazy, eager) if now >= quiet[worker] else ():
                beats = random.Random(f"{seed} {step} {worker}")
                if beats.random() < 0.8:
                    at = beats.choice([WAITS, COMPUTES, ELSEWHERE])
                    detector.heartbeat(
                        Heartbeat(worker.rank, 0, beats.choice([7, step]), Activity(at, f"0F0.0@{step // 50}"))
                    )
                if beats.random() < 0.8:
                    detector.supervisor_heartbeat(SupervisorHeartbeat(worker.rank, beats.random() < 0.1, now))
        for detector in (lazy, eager):
            if step % 40 == 0:
                detector.committed(step // 50, now)
            if step % 301 == 300:
                detector.dismiss(workers[step % 5])
                detector.observe(workers[step % 5])
                detector._signs = dict(sorted(detector._signs.items()))
    assert suspected
