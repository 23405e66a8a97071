"""Restart from a checkpoint: every change ends the job, which starts again from the last save on whole pipelines.
Returning workers are taken in after a save made for them, so that no work is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recycle_plugin.lab.simulator.peers.peer_job import PeerJob, Transitions
from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange, count_after


@dataclass(frozen=True)
class RestartFromCheckpoint:
    """The policy of restarting from a checkpoint; its state is the number of live workers. Saves stop training while
    they are written, every sqrt(2 save mean_between) seconds (Young). The global batch is kept.
    """

    job: PeerJob
    costs: Transitions = Transitions()
    name: str = "restart from checkpoint"
    source: str = "common practice; restart, storage and interval assumed (peers/peer_job.py)"
    validated: str = ""

    def start(self) -> int:
        """Return the state of the whole cluster."""
        return self.job.workers

    def speed(self, state: int) -> float:
        """Return the samples per second with ``state`` workers, saves included."""
        whole = min(state // self.job.topology.stages, self.job.topology.replicas)
        return self._whole(whole) * self.trained_share

    @property
    def trained_share(self) -> float:
        """The share of the time that saves leave."""
        return self.every_s / (self.every_s + self.save_s)

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        lost_s = trained_s % (self.every_s + self.save_s) if change.lost else 0.0
        return count_after(state, change), self._restart(change, lost_s)

    def _restart(self, change: WorkersChange, lost_s: float) -> PeerTransition:
        if change.lost:
            return PeerTransition(self.costs.restart_s + self.save_s, lost_s, "restart and load")
        return PeerTransition(self.costs.restart_s + 2 * self.save_s, 0.0, "save, restart and load")

    @cached_property
    def every_s(self) -> float:
        """The seconds between saves."""
        return (2 * self.save_s * self.costs.mean_between_s) ** 0.5

    @cached_property
    def save_s(self) -> float:
        """How long one worker's state takes to storage, or back, in seconds."""
        return self.job.largest_state / self.costs.storage_rate

    @property
    def to_host_s(self) -> float:
        """How long one worker's state takes to host memory, in seconds."""
        return self.job.largest_state / self.costs.host_rate

    def _whole(self, pipelines: int) -> float:
        if pipelines not in self._speeds:
            self._speeds[pipelines] = self.job.pipelines(pipelines)
        return self._speeds[pipelines]

    @cached_property
    def _speeds(self) -> dict[int, float]:
        return {}
