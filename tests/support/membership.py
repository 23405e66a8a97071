"""A membership of 2 replicas x 2 stages, whose workers the test plays."""

from __future__ import annotations

from dataclasses import fields, replace

from recycle_plugin.core.coordinator.facts.output import CoordinatorOutput, SupervisorOf
from recycle_plugin.core.coordinator.membership import Membership
from recycle_plugin.core.messages.activity import COMPUTES, Activity
from recycle_plugin.core.messages.from_coordinator import Restart, Resume
from recycle_plugin.core.messages.from_workers import Ready, Stepped, SurvivorReport
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member

REPLICAS, STAGES = 2, 2
DEADLINES = Deadlines(
    heartbeat_timeout_s=3.0,
    progress_timeout_s=5.0,
    busy_timeout_s=20.0,
    last_worker_timeout_s=40.0,
    idle_timeout_s=60.0,
    wait_timeout_s=100.0,
)


def computes(instruction: str) -> Activity:
    return Activity(COMPUTES, Instruction.parse(instruction))


def member(rank: int, host: str = "h", replicas: int = REPLICAS) -> Member:
    return Member(rank, Seat(rank % replicas, rank // replicas), f"tcp://a:{rank}", host)


def job(**more: object) -> JobSpec:
    deadlines = {each.name: more.pop(each.name) for each in fields(Deadlines) if each.name in more}
    return replace(
        JobSpec(
            REPLICAS,
            STAGES,
            1,
            (),
            "r",
            CostModel.uniform(more.get("stages", STAGES)),
            Policy(),
            replace(DEADLINES, **deadlines),
            rebalance=True,
        ),
        **more,
    )


def started(**more: object) -> Membership:
    """Of four workers, by default 2 x 2."""
    membership = Membership(REPLICAS * STAGES)
    for rank in range(4):
        membership.receive(Ready(member(rank, replicas=job(**more).replicas), 0, job(**more)), 0.0)
    agree(membership, 0, dict.fromkeys(range(4), 0))
    return membership


def holds(rank: int) -> dict[str, str]:
    """What the worker of ``rank`` reports to hold, which nobody else does."""
    return {"wgrad 0@1": f"0.{rank}:{rank}"}


def agree(membership: Membership, generation: int, stepped: dict[int, int]) -> CoordinatorOutput:
    for rank, count in stepped.items():
        out = membership.receive(SurvivorReport(rank, generation, count, "plan", holds(rank)), 0.0)
    return out


def resumed(out: CoordinatorOutput) -> list[tuple[int, int]]:
    """Generation and committed step of every Resume, which also carries what all members have reported."""
    found = said(out, Resume)
    assert all(value.keys() == holds(0).keys() for one in found for value in one.held.values())
    return [(one.generation, one.committed) for one in found]


def step(membership: Membership, generation: int, number: int, ranks: range | list = range(4)) -> list[object]:
    return [m for rank in ranks for _, m in membership.receive(Stepped(rank, generation, number), 0.0).messages]


def said(out: CoordinatorOutput, kind: type) -> list:
    return [message for _, message in out.messages if isinstance(message, kind)]


def orders(out: CoordinatorOutput) -> list[tuple[int, int, float]]:
    """(rank, incarnation, seconds) of all that are to be started, each said to that rank's supervisor alone."""
    found = [(whom, one) for whom, one in out.messages if isinstance(one, Restart)]
    assert all(whom == SupervisorOf(one.rank) for whom, one in found)
    return [(one.rank, one.incarnation, one.after_s) for _, one in found]


RICH = job(
    ties=((0, 1),),
    costs=CostModel((1, 2), (3, 4), (5, 6), slowness=((Seat(1, 0), 150),)),
    policy=Policy(activation_cap=(2, 3), block=None),
    keep_bytes=7,
    clipping=1,
    arithmetic="torch",
    seed=1 << 70,
)
