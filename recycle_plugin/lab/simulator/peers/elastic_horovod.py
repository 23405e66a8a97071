"""Elastic Horovod: commits to host memory, and after a change a reset in live processes to the last commit. It knows
only data parallelism; here each of its members is a whole pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange, count_after
from recycle_plugin.lab.simulator.peers.restart_from_checkpoint import RestartFromCheckpoint


@dataclass(frozen=True)
class ElasticHorovod(RestartFromCheckpoint):
    """The policy of Elastic Horovod. ``commit_steps``: steps between commits."""

    commit_steps: int = 10
    name: str = "Elastic Horovod"
    source: str = "its documentation: commit, restore, sync; interval and reset assumed (peers/peer_job.py)"

    @property
    def trained_share(self) -> float:
        return 1 - self.to_host_s / self.every_s

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        lost_s = trained_s % self.every_s if change.lost else 0.0
        return count_after(state, change), PeerTransition(self.costs.reset_s + self.sync_s, lost_s, "reset and sync")

    @cached_property
    def sync_s(self) -> float:
        """How long the state takes from rank 0 to the others, in seconds."""
        return self.job.profile.across.transfer_us(self.job.largest_state) / 1e6

    @cached_property
    def every_s(self) -> float:
        return self.commit_steps * self.job.fault_free_us / 1e6 + self.to_host_s
