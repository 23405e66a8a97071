"""A job whose size a test chooses, in its second step, and how many of the interpreter's instructions work takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from recycle_plugin.core.coordinator.membership import Membership
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
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.settings.schema import Settings
from tests.support.membership import computes

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
        membership.receive(Heartbeat(rank, 2, 2, computes("0F0.0@2"), 2), 1.0)
        membership.receive(SupervisorHeartbeat(rank, False, 0.0), 1.0)
    membership.tick(1.0)
    membership.tick(1.0)
    assert membership.committed == 1 and not membership.state.halted
    return membership


def of_step(rank: int, replicas: int, step: int) -> Iterator[Any]:
    yield Heartbeat(rank, 1, step, computes(f"0F0.1@{step}"), step)
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
