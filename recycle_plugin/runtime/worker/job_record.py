"""What a worker asks the coordinator for: the job as all its workers have to describe it."""

from __future__ import annotations

from recycle_plugin.core.messages.job_spec import JobSpec
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.log_boundaries import ALL
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.ports import Framework
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError

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
)  # settings that all workers have to have alike


def planning(settings: Settings, framework: Framework, topology: Topology) -> tuple[bool, CostModel, Policy]:
    """Whether steps wait for the norm, and what plans are made by."""
    waits = settings.waits_for_norm(framework.clipping)
    costs = settings.cost_model(topology, framework.micro_batch_size)
    return waits, costs, settings.policy(waits, topology.stages)


def job_spec(
    settings: Settings,
    framework: Framework,
    topology: Topology,
    run_dir: str,
    boundaries: str | tuple[int, ...] = ALL,
) -> JobSpec:
    """The job of a worker with these settings; ``boundaries``: those over which it is logged what crosses them."""
    _, costs, policy = planning(settings, framework, topology)
    return JobSpec(
        topology.replicas,
        topology.stages,
        topology.micro_batches,
        topology.ties,
        run_dir,
        costs,
        policy,
        batch=framework.batch(),
        norm=str(settings.norm),
        clipping=framework.clipping,
        exact=bool(settings.exact),
        arithmetic=framework.model.device.arithmetic() if settings.exact else None,
        pushed=framework.pushed is not None,
        log=settings.log is not None,
        boundaries=boundaries,
        log_budget=None if settings.log is None else settings.log.budget_bytes,
        folders=_folders(settings),
        **{name: getattr(settings, name) for name in ALIKE},
    )


def _folders(settings: Settings) -> tuple[tuple[str, str], ...]:
    """The folders that the job writes to, by the setting that names each, beside the run folder."""
    named = {"checkpoint_dir": settings.checkpoint_dir, "log.folder": settings.log and settings.log.folder}
    return tuple((setting, folder) for setting, folder in named.items() if folder)


def check_faults(settings: Settings, topology: Topology) -> None:
    """Raise RecycleError if a fault is to strike a seat that there is not."""
    try:
        settings.refuse_faults(topology)
    except SettingsError as error:
        raise RecycleError(str(error)) from None
