"""The job that simulated workers ask to take part in, and their addresses."""

from __future__ import annotations

from dataclasses import replace

from recycle_plugin.core.messages.from_workers import LogFolder, Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.lab.simulator.scenario import Scenario

SILENCE_S = 3.0  # heartbeat timeout in jobs that may lose hosts
PATIENT_S = 6.0
DEADLINES = Deadlines(
    progress_timeout_s=1.0,
    busy_timeout_s=4.0,
    last_worker_timeout_s=8.0,
    idle_timeout_s=20.0,
    wait_timeout_s=35.0,
)


def _deadlines(scenario: Scenario) -> Deadlines:
    if scenario.takes_over:  # a worker that reconnects must not be taken for stuck
        return replace(DEADLINES, heartbeat_timeout_s=SILENCE_S, progress_timeout_s=PATIENT_S, busy_timeout_s=PATIENT_S)
    return replace(DEADLINES, heartbeat_timeout_s=SILENCE_S) if scenario.loses_hosts else DEADLINES


def job(scenario: Scenario) -> JobSpec:
    """Return the specification that every worker of ``scenario`` sends."""
    shape, policy = scenario.shape, scenario.policy
    return JobSpec(
        shape.replicas,
        shape.stages,
        shape.micro_batches,
        shape.ties,
        "",
        scenario.costs,
        policy,
        _deadlines(scenario),
        rebalance=scenario.rebalances,
        rejoin=scenario.rejoin,
        unit=scenario.unit,
        pushed=scenario.pushes,
        log=scenario.logs,
        boundaries=scenario.log_choices[0] if scenario.log_choices else "all",
        stagger_optimizer=policy.stagger_optimizer,
        clipping=0.0 if scenario.pushes else scenario.clip,
        clip="sync" if policy.together else "validate",
        nonfinite="skip",
    )


def address(rank: int, incarnation: int) -> str:
    """Return where others find process ``incarnation`` of ``rank``."""
    return f"{rank}" + f".{incarnation}" * (incarnation > 0)


def rank_at(address: str) -> int:
    """Return the rank of the process that is found at ``address``."""
    return int(address.partition(".")[0])


def ready(scenario: Scenario, rank: int, seat: Seat, shard: int, incarnation: int) -> Ready:
    """Return the message by which process ``incarnation`` of ``rank`` asks to take part, as ``shard`` of ``seat``."""
    host = f"host{rank}"
    logs = LogFolder("", host if scenario.logs_apart else "all hosts", "") if scenario.logs else None
    return Ready(Member(rank, seat, address(rank, incarnation), host, incarnation, shard), 0, job(scenario), logs)
