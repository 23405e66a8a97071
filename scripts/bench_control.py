#!/usr/bin/env python
"""CPU time of the coordinator of thousands of workers, and of each of them after a loss.

scripts/bench_control.py                            # 8 x 4, 16 x 16 and 32 x 48 workers
scripts/bench_control.py --shapes 64x64 --micro-batches 128 --out runs/control
scripts/bench_control.py --shapes 32x48 64x192 --alone    # only the state machine: 1,536 and 12,288 workers

No job runs: the coordinator's state machine gets the messages of such a job's workers, in a random order. In the middle
of a step a worker is lost; each worker then holds what the plan says. Reading and writing the messages of a step is
counted separately. Then all workers connect to the coordinator's server over loopback (lab/control_sockets.py). The
server is first idle but for heartbeats, and then receives the messages of steps.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from recycle_plugin import planner
from recycle_plugin.core.coordinator.facts.output import Whom
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import COMPUTES, Activity
from recycle_plugin.core.messages.encoding import decode, encode
from recycle_plugin.core.messages.from_coordinator import Generation, Resume
from recycle_plugin.core.messages.from_workers import (
    Contribution,
    Exited,
    Heartbeat,
    Ready,
    Stepped,
    SurvivorReport,
)
from recycle_plugin.core.messages.generation_forms import GenerationForEach
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.compute_time import ComputeTime
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.dataflow import Datum, consumes, provides, requires
from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat
from recycle_plugin.core.vocabulary.instruction import RECEIVES, SENDS, STAGE_WIDE, Instruction, Op
from recycle_plugin.core.vocabulary.packed_data import of_each, pack
from recycle_plugin.core.vocabulary.plan import Plan, Policy
from recycle_plugin.core.vocabulary.recovery_plan import unfinished
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.core.worker.collector import no_collections
from recycle_plugin.lab import control_sockets
from recycle_plugin.lab.experiments.bench_scripts import script
from recycle_plugin.planner.recovery import recover
from recycle_plugin.settings.schema import Settings

STEPS = 5
HEARTBEATS, TICKS = 2, 20  # heartbeats of a worker, and ticks of the coordinator, in a step of 5 s
AT_ONCE = 100  # messages that are read before they are handled, so the clock is not read for each
DEADLINES = Settings().deadlines
HOST = 8  # workers of a host
SERVED = 10  # steps over connections: a process's time has a resolution of 10 ms
IDLE_S = 10.0  # the time in which the coordinator's server gets only heartbeats


class Measured(NamedTuple):
    """CPU seconds and bytes. The coordinator's: ``start``, until all may begin; ``step``, a median; ``codec``, to read
    and write a step's messages; ``loss``, until all may go on; ``many``, the same for a sixth of the workers lost at
    once. ``left``: a worker's, to work out the rest of the step. ``told``: bytes sent to each worker at the loss.
    ``told_first``: bytes that one process sends to all workers at the start, so that each knows the others. The
    coordinator's server, over connections: ``idle``, the share of a core that heartbeats take, and ``served``, the
    seconds of a step; None if not measured.
    """

    workers: int
    start: float
    step: float
    codec: float
    loss: float
    many: float
    left: float
    told: int
    told_first: int
    idle: float | None = None
    served: float | None = None

    def behind(self, before: Measured) -> str:
        """Return in words how the bytes at the start have grown with the workers since the measurement ``before``."""
        exponent = log(self.told_first / before.told_first) / log(self.workers / before.workers)
        return f"bytes at the start: workers ** {exponent:.2f} from {before.workers} to {self.workers} workers"

    def __str__(self) -> str:
        alone = (
            f"{self.workers:5} workers: {1e3 * self.start:7.1f} ms the start, {1e3 * self.step:7.1f} ms a step and "
            f"{1e3 * self.codec:7.1f} ms to read and write its messages, {1e3 * self.loss:7.1f} ms a loss, "
            f"{1e3 * self.many:7.1f} ms the loss of a sixth, "
            f"{self.told_first / 1024:7.1f} KiB to all at the start, {self.told / 1024:7.1f} KiB to each at a loss, "
            f"which takes {1e3 * self.left:7.1f} ms to work out what is left"
        )
        if self.idle is None or self.served is None:
            return alone
        return f"{alone}; over connections {self.idle:6.1%} of a core if idle, {1e3 * self.served:7.1f} ms a step"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=[(8, 4), (16, 16), (32, 48)], metavar="DxP")
    parser.add_argument("--micro-batches", type=int, default=64)
    parser.add_argument("--alone", action="store_true", help="without connections")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_control"))
    found = parser.parse_args(arguments)
    rows: list[Measured] = []
    for replicas, stages in found.shapes:
        row = measured(Topology(replicas, stages, found.micro_batches), not found.alone)
        print(row, flush=True)
        if rows and rows[-1].workers != row.workers:
            print(row.behind(rows[-1]), flush=True)
        rows.append(row)
    found.out.mkdir(parents=True, exist_ok=True)
    (found.out / "control.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


def _shape(text: str) -> tuple[int, int]:
    replicas, _, stages = text.partition("x")
    return int(replicas), int(stages)


def measured(shape: Topology, connects: bool = True) -> Measured:
    """Return the costs of a job of this shape; without ``connects`` not those over connections."""
    costs, whole = CostModel.uniform(shape.stages), shape.full()
    lost = Seat(shape.replicas // 2, shape.stages // 2)
    planner.warm()
    before, after = (planner.plan(view, costs, Policy()) for view in (whole, whole.without(lost)))
    job = JobSpec(shape.replicas, shape.stages, shape.micro_batches, (), "", costs, Policy(), DEADLINES, rebalance=True)
    ranks = {seat: seat.replica * shape.stages + seat.stage for seat in sorted(whole.live)}
    membership, whole_job, start = started(job, ranks)
    steps = [one_step(membership, job, ranks, step) for step in range(1, STEPS + 1)]
    step, codec = map(median, zip(*steps))
    told: list[object] = []
    held = {seat: pack(data) for seat, data in holdings(before, STEPS + 1).items() if seat != lost}
    survivors = {ranks[seat]: held[seat] for seat in held}
    loss = spent(lambda: told.extend(one_loss(membership, survivors, ranks[lost])))
    (resume,) = (each for each in told if isinstance(each, Resume))
    sixth = sorted(held)[: max(len(held) // 6, 1)]
    for seat in sixth:
        del held[seat]
    survivors = {ranks[seat]: held[seat] for seat in held}
    many = spent(lambda: list(one_loss(membership, survivors, *(ranks[seat] for seat in sixth))))
    left = spent(lambda: worked_out(after, costs, resume, Seat(0, 0)))
    told_to_each = sum(map(len, sent(told, whole_job)))
    row = Measured(len(ranks), start, step, codec, loss, many, left, told_to_each, sum(map(len, first(whole_job))))
    if not connects:
        return row
    all_said = (of_step(job, ranks, step) for step in range(1, SERVED + 1))
    said = ([each for each in messages if not isinstance(each, Heartbeat)] for messages in all_said)
    served = control_sockets.measured(job, ranks, IDLE_S, said)
    return row._replace(idle=served.idle, served=served.step)


def spent(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def started(job: JobSpec, ranks: dict[Seat, int]) -> tuple[Membership, Generation, float]:
    """Return the state of a job that all its workers have joined, what they have heard of its membership, and the
    CPU seconds that it took.
    """
    membership = Membership(len(ranks))
    told: list[tuple[Whom, object]] = []
    members = [
        Member(rank, seat, f"tcp://host{rank // HOST}:{rank}", f"host{rank // HOST}") for seat, rank in ranks.items()
    ]

    def join() -> None:
        for member in members:
            told.extend(membership.receive(Ready(member, 0, job), 0.0).messages)
        for rank in ranks.values():
            membership.receive(SurvivorReport(rank, 0, 0, "plan"), 0.0)

    start = spent(join)
    assert membership.generation == 0 and membership.started
    (first,) = (each for _, each in told if isinstance(each, Generation))
    return membership, first, start


def one_step(membership: Membership, job: JobSpec, ranks: dict[Seat, int], step: int) -> tuple[float, float]:
    """Return the coordinator's time for a step without a failure, and for reading and writing its messages."""
    frames = [encode(each) for each in of_step(job, ranks, step)]
    handled, ticked, handling, codec = 0, 0, 0.0, 0.0
    for begin in range(0, len(frames), AT_ONCE):
        messages: list[object] = []
        told: list[tuple[Whom, object]] = []
        codec += spent(lambda: messages.extend(map(decode, frames[begin : begin + AT_ONCE])))

        def handle() -> None:
            nonlocal handled, ticked
            for message in messages:
                handled += 1
                while ticked * len(frames) < handled * TICKS:
                    ticked += 1
                    told.extend(membership.tick((step * TICKS + ticked) * TICK_S).messages)
                told.extend(membership.receive(message, (step * TICKS + ticked) * TICK_S).messages)

        handling += spent(handle)
        codec += spent(lambda: [encode(message) for _, message in told])
    assert membership.committed == step
    return handling, codec


def of_step(job: JobSpec, ranks: dict[Seat, int], step: int) -> Iterator[object]:
    """Return all messages to the coordinator in a step."""
    order, batch = list(ranks.items()), len(job.shape.batch)
    random.Random(step).shuffle(order)
    for number in range(HEARTBEATS):
        for seat, rank in order:
            doing = Activity(COMPUTES, Instruction(Op.F, seat.stage, MicroBatch(0, 0), step))
            yield Heartbeat(rank, HEARTBEATS * step + number, 2 * step + number, doing, step)
    for seat, rank in order:
        if seat.stage == job.stages - 1:
            losses = {f"{seat.replica}.{index}": 1.0 for index in range(job.micro_batches)}
            yield Contribution(rank, step, "loss", losses, batch)
        yield Stepped(rank, 0, step, time=ComputeTime(1000 + rank % 7, 1000))


def one_loss(membership: Membership, held: dict[int, dict[str, str]], *lost: int) -> Iterator[object]:
    """Return the coordinator's messages to all survivors from the news of deaths until they may go on."""
    now = (STEPS + 2) * TICKS * TICK_S
    outs = [membership.receive(Exited(rank, -9, now), now) for rank in lost]
    outs.append(membership.tick(now + TICK_S))
    newest = membership.generation
    for rank, data in held.items():
        outs.append(membership.receive(SurvivorReport(rank, newest, STEPS, "plan", data), now + TICK_S))
    assert membership.state.regrouping.in_force == newest
    return (each for out in outs for _, each in out.messages if isinstance(each, Generation | Resume))


def sent(told: Iterable[object], whole: Generation) -> Iterator[bytes]:
    """Return the frames of what is ``told`` to workers that have heard of the generation ``whole`` before."""
    for each in told:
        if isinstance(each, Generation):
            yield encode(each.changed(whole))
            whole = each
        else:
            yield encode(each)


def first(whole: Generation) -> Iterator[bytes]:
    """Return the frames in which the workers hear of the generation ``whole`` as their first."""
    hosts = dict.fromkeys(member.host for member in whole.members)
    told = GenerationForEach(whole, {host: number for number, host in enumerate(hosts)})
    return (encode(told.first(member.seat, member.shard)) for member in whole.members)


def holdings(plan: Plan, step: int) -> dict[Seat, set[Datum]]:
    """Return what each worker holds in the middle of a step of ``plan``."""
    held = {seat: {Datum("params", seat.stage, None, step)} for seat in plan.view.live}
    for seat, data in held.items():
        for each, start in zip(plan.programs[seat], plan.starts[seat], strict=True):
            one = each.at(step)
            if start >= plan.period_us // 2 or one.op in SENDS or one.op in STAGE_WIDE:
                continue
            if one.op in RECEIVES:
                data.update(requires(one, plan.stages))
            else:
                data.difference_update(consumes(one, plan.stages))
                data.update(provides(one))
    return held


@no_collections()
def worked_out(plan: Plan, costs: CostModel, resume: Resume, seat: Seat) -> None:
    """Work out the rest of the step for ``seat``, as a worker does."""
    for recovery in unfinished(partial(recover, plan, costs), resume.committed, of_each(resume.held)):
        assert recovery.program(seat)


if __name__ == "__main__":
    script(main)
