"""What a message or a tick costs the coordinator does not grow with the workers that it is not about."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from recycle_plugin.core.coordinator.facts.failure_detector import FailureDetector
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import COMPUTES, ELSEWHERE, WAITS, Activity
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Heartbeat,
    Ready,
    Stepped,
    SupervisorHeartbeat,
    SurvivorReport,
)
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member, WorkerId
from recycle_plugin.settings.schema import Settings

DEADLINES = Settings().deadlines
STAGES = 4


def job(replicas: int) -> Membership:
    """The state of a job of four stages in its second step, which is over for all but ranks 4 and 5."""
    spec = JobSpec(replicas, STAGES, 2, (), "", CostModel.uniform(STAGES), Policy(), DEADLINES)
    membership = Membership(replicas * STAGES)
    ranks = range(replicas * STAGES)
    for rank in ranks:
        seat = Seat(*divmod(rank, STAGES))
        membership.receive(Ready(Member(rank, seat, f"tcp://{rank}", "host"), 0, spec), 0.0)
    for rank in ranks:
        membership.receive(SurvivorReport(rank, 0, 0, "plan"), 0.0)
    for rank in ranks:
        membership.receive(Stepped(rank, 0, 1), 0.5)
    assert membership.committed == 1
    for rank in (*range(STAGES), *range(STAGES + 2, replicas * STAGES)):
        for message in of_step(rank, replicas, 2):
            membership.receive(message, 1.0)
    for rank in ranks:
        membership.receive(Heartbeat(rank, 2, 2, Activity(COMPUTES, "0F0.0@2"), 2), 1.0)
        membership.receive(SupervisorHeartbeat(rank, False, 0.0), 1.0)
    membership.tick(1.0)
    membership.tick(1.0)
    assert membership.committed == 1 and not membership.state.halted
    return membership


def of_step(rank: int, replicas: int, step: int) -> Iterator[Any]:
    yield Heartbeat(rank, 1, step, Activity(COMPUTES, f"0F0.1@{step}"), step)
    yield SupervisorHeartbeat(rank, False, 1.0)
    yield Contribution(rank, step, "norm", {str(rank % STAGES): 1.0}, STAGES)
    yield Contribution(rank, step, "loss", {f"{rank // STAGES}.{index}": 1.0 for index in range(2)}, 2 * replicas)
    yield Stepped(rank, 0, step, time=ComputeTime(10, 10))


def instructions(work: Callable[[], object]) -> int:
    """How many of the interpreter's instructions ``work`` takes; what is written in C counts as one."""
    count, before = 0, sys.gettrace()

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return note

    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


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
