"""The description of a job for the coordinator; it has to be the same on every worker."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.messages.typed import Finite
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.deadlines import Deadlines
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.roster import FailureDomain
from recycle_plugin.core.vocabulary.topology import Topology


@dataclass(frozen=True)
class JobSpec:
    """The job as its workers' settings describe it; the ``start`` event shows it to the user, field by field.

    ``batch``: samples in a step of all replicas. ``clipping``: the limit of the gradient norm, 0 for none.
    ``arithmetic``: in exact mode, what decides how operations round. ``log``: boundary tensors are logged, so that a
    stage without a live worker can be replayed: those of ``boundaries``, in at most ``log_budget`` bytes. ``pushed``:
    scripts push their micro-batches (core/worker/pushed.py). ``folders``: those set beside ``run_dir``, by setting.
    Times are in seconds. The others are the settings of the same name.
    """

    replicas: int
    stages: int
    micro_batches: int
    ties: tuple[tuple[int, ...], ...]
    run_dir: str
    costs: CostModel
    policy: Policy
    deadlines: Deadlines = Deadlines()
    placement: str = "deepspeed"
    batch: int = 0
    report: bool = False
    rebalance: str | bool = False
    stagger_optimizer: bool = True
    clipping: Finite = 0.0
    clip: str = "sync"
    nonfinite: str = "end"
    norm: str = "True"
    loss_scaling: bool = False
    undo: str = "snapshot"
    keep_bytes: int | None = None
    rng: str = "keyed"
    seed: int = 0
    exact: bool = False
    arithmetic: str | None = None
    metrics: str | None = None
    rejoin: str | int = "never"
    unit: str = "worker"
    pushed: bool = False
    log: bool = False
    boundaries: str | tuple[int, ...] = "all"
    log_budget: int | None = None
    folders: tuple[tuple[str, str], ...] = ()
    console: str = "all"

    @property
    def shape(self) -> Topology:
        return Topology(self.replicas, self.stages, self.micro_batches, self.ties)

    @property
    def domain(self) -> FailureDomain:
        """The unit that is given up as one: a replica if ``unit`` says so, else a seat."""
        return FailureDomain.REPLICA if self.unit == "replica" else FailureDomain.SEAT
