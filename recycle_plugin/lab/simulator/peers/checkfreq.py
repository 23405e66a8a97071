"""CheckFreq (FAST'21): snapshots to host memory, written to storage in the background, as often as 5% overhead allows.
A loss costs a restart and the work since the last persisted snapshot. No spare is waited for: the job restarts on whole
pipelines, as restart from a checkpoint does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange, count_after
from recycle_plugin.lab.simulator.peers.restart_from_checkpoint import RestartFromCheckpoint


@dataclass(frozen=True)
class CheckFreq(RestartFromCheckpoint):
    """The policy of CheckFreq. ``overhead``: the share of the time that snapshots may cost."""

    overhead: float = 0.05
    name: str = "CheckFreq"
    source: str = "FAST'21: profiled interval, overhead held under 5%; rates assumed (peers/peer_job.py)"

    @property
    def trained_share(self) -> float:
        return 1 - self.to_host_s / self.every_s

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        lost_s = min(trained_s, trained_s % self.every_s + self.save_s)  # the newest snapshot may not be written yet
        return count_after(state, change), self._restart(change, lost_s)

    @cached_property
    def every_s(self) -> float:
        """The seconds between snapshots: as the overhead allows, but not before the last one is written."""
        return max(self.to_host_s / self.overhead, self.save_s, self.job.fault_free_us / 1e6)
