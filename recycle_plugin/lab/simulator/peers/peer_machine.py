"""The costs of changes on a cluster, under other systems and under our runtime. They were written down before any
comparison was run, and not changed to meet a published point.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.machine_constants import CLUSTER, MachineCosts
from recycle_plugin.planner.log_line import STORAGE_BYTES_PER_S


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
