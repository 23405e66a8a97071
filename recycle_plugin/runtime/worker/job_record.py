"""What a worker asks the coordinator for: a place in the job, which all its workers have to describe alike."""

from __future__ import annotations

from recycle_plugin.core.messages.from_workers import Ready
from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.log_boundaries import ALL
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import Member
from recycle_plugin.runtime.worker.parts import Parts

ALIKE = (
    "deadlines",
    "placement",
    "report",
    "rebalance",
    "stagger_optimizer",
    "clip",
    "nonfinite",
    "loss_scaling",
    "undo",
    "keep_bytes",
    "rng",
    "seed",
    "rejoin",
    "unit",
    "metrics",
    "console",
)  # settings that must be the same on all workers


def planning(parts: Parts) -> tuple[bool, CostModel, Policy]:
    """Return whether steps of the worker that has ``parts`` wait for the norm, and the costs and policy of plans."""
    settings, framework, topology = parts.settings, parts.framework, parts.topology
    waits = settings.waits_for_norm(framework.clipping)
    costs = settings.cost_model(topology)
    return waits, costs, settings.policy(waits, topology.stages)


def ready(parts: Parts, step: int) -> Ready:
    """Return the report that the worker that has ``parts``, after its last step ``step``, can take its place."""
    session, log = parts.session, parts.log
    member = Member(
        session.rank, parts.seat, parts.transport.address, session.host, session.view.incarnation, parts.framework.shard
    )
    where = None if log is None else log.where(session, parts.settings.transfer_interface)
    return Ready(member, step, _job(parts), where)


def _job(parts: Parts) -> JobSpec:
    settings, framework, topology, log = parts.settings, parts.framework, parts.topology, parts.log
    _, costs, policy = planning(parts)
    # the folders that the job writes to beside the run folder, by setting
    folders = {"checkpoint_dir": settings.checkpoint_dir, "log.folder": settings.log and settings.log.folder}
    return JobSpec(
        topology.replicas,
        topology.stages,
        topology.micro_batches,
        topology.ties,
        parts.run_dir,
        costs,
        policy,
        batch=framework.batch(),
        norm=str(settings.norm),
        clipping=framework.clipping,
        exact=bool(settings.exact),
        arithmetic=framework.model.device.arithmetic() if settings.exact else None,
        pushed=framework.pushed is not None,
        log=log is not None,
        boundaries=ALL if log is None else log.boundaries,
        log_budget=None if settings.log is None else settings.log.budget_bytes,
        folders=tuple((setting, folder) for setting, folder in folders.items() if folder),
        **{name: getattr(settings, name) for name in ALIKE},
    )
