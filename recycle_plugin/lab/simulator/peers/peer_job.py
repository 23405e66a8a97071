"""A training job as the policies see it, a profile (measured or analytic) on a topology; and the costs of changes on a
cluster, under other systems and under our runtime. The costs were written down before any comparison was run, and not
changed to meet a published point.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.plan import Policy
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.planner.machine_costs import CLUSTER, MachineCosts
from recycle_plugin.lab.planner.profile import LayerProfile, Profile
from recycle_plugin.planner import plan
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S

STOCK = Policy(split_backward=False, stagger_optimizer=False, reroute=False)


@dataclass(frozen=True)
class PeerJob:
    """A job that all policies train. ``topology``: of the fault-free job, with its micro-batches per replica; samples
    are sequences. ``memory_limit``: bytes of one accelerator; GCP's a2-highgpu machines have the A100 of 40 GB.
    """

    name: str
    topology: Topology
    profile: Profile
    memory_limit: float = 40e9

    @property
    def workers(self) -> int:
        return self.topology.replicas * self.topology.stages

    @property
    def batch(self) -> int:
        return self.topology.replicas * self.topology.micro_batches * self.profile.micro_batch

    @cached_property
    def costs(self) -> CostModel:
        """The cost model of the fault-free job."""
        return self.profile.costs(self.topology.stages, self.topology.replicas)

    @cached_property
    def parts(self) -> tuple[LayerProfile, ...]:
        """All layers in order, embedding and head included."""
        return (self.profile.first, *[self.profile.layer] * self.profile.layers, self.profile.last)

    @property
    def parameters(self) -> int:
        """The parameters of the whole model, per accelerator of a tensor-parallel group."""
        return sum(part.parameters for part in self.parts) // self.profile.gpus_per_worker

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """The bytes of one worker's state, per stage."""
        return self.profile.state_bytes(self.topology.stages)

    @property
    def largest_state(self) -> int:
        """The bytes of the largest stage's state."""
        return max(self.state_bytes)

    def memory_bytes(self, stage: int, micro_batches: int) -> int:
        """Return the bytes of the state and ``micro_batches`` micro-batches' activations on a worker of ``stage``."""
        return self.state_bytes[stage] + micro_batches * self.costs.activation_bytes[stage]

    @property
    def load_us(self) -> tuple[int, ...]:
        """The microseconds of one micro-batch's F, I and W, per stage."""
        return tuple(map(sum, zip(self.costs.forward, self.costs.input, self.costs.weight)))

    @cached_property
    def fault_free_us(self) -> int:
        """The microseconds of a step of fault-free 1F1B: the papers' baseline."""
        return plan(self.topology.full(), self.costs, STOCK).period_us

    @property
    def fault_free(self) -> float:
        """The samples per second of fault-free 1F1B."""
        return 1e6 * self.batch / self.fault_free_us

    def pipelines(self, count: int) -> float:
        """Return the samples per second of 1F1B with the whole batch on ``count`` pipelines; 0 for none."""
        if count < 1:
            return 0.0
        whole = self.topology
        each = -(-whole.replicas * whole.micro_batches // count)
        costs = self.profile.costs(whole.stages, count)
        return 1e6 * self.batch / plan(Topology(count, whole.stages, each).full(), costs, STOCK).period_us


@dataclass(frozen=True)
class Transitions:
    """The costs of changes. ``machine``: under our runtime, with its source. All others are assumed."""

    machine: MachineCosts = CLUSTER
    restart_s: float = 60.0  # assumed: end and start of all processes, with framework imports
    reset_s: float = 15.0  # assumed: an elastic framework's re-initialisation inside live processes
    storage_rate: float = STORAGE_BYTES_PER_S  # assumed, of each worker, to persistent storage
    host_rate: float = 12e9  # assumed, bytes per second from accelerator to host memory
    mean_between_s: float = 1800.0  # assumed: what a user expects between failures, for the checkpoint interval

    @property
    def own_s(self) -> float:
        """The seconds from a worker's death to the next instruction under our runtime, without state copies."""
        return (self.machine.detection_us + self.machine.pause_us) / 1e6
