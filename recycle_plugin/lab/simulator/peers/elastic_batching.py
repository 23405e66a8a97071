"""Elastic batching: a pipeline that lost a worker stops, the batch shrinks, whole pipelines go on. Survivors are joined
to whole pipelines, which keeps more than dropping each hurt one. The samples per second are comparable with the
others'; the training is not, since its global batch changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.lab.simulator.peers.peer_job import PeerJob, Transitions
from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange, count_after


@dataclass(frozen=True)
class ElasticBatching:
    """The policy of elastic batching. Its state is the number of live workers."""

    job: PeerJob
    costs: Transitions = Transitions()
    name: str = "elastic batching"
    source: str = "live pipelines / DP; transitions assumed as our own regrouping"
    validated: str = ""

    def start(self) -> int:
        """Return the state of the whole cluster."""
        return self.job.workers

    def speed(self, state: int) -> float:
        """Return the samples per second of the whole pipelines of ``state`` workers."""
        whole = min(state // self.job.topology.stages, self.job.topology.replicas)
        return self.job.fault_free * whole / self.job.topology.replicas

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        lost_s = trained_s % (self.job.fault_free_us / 1e6) if change.lost else 0.0
        return count_after(state, change), PeerTransition(self.costs.own_s, lost_s, "regroup")
