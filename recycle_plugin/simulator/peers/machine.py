"""What changes cost a cluster, each figure with where it comes from.

Written down before any comparison was run, and not changed to meet a published point.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transitions:
    """Measured here: scripts/bench_recovery.py, 2 x 2 CPU workers, Gloo, medians.  The rest is assumed."""

    detection_s: float = 0.017  # measured
    regroup_s: float = 0.033  # measured: agreement and planning, and what the benchmark can't attribute
    communicators_s: float = 3.0  # assumed: new NCCL communicators on all GPUs; Gloo needs nothing comparable
    restart_s: float = 60.0  # assumed: end and start of all processes, framework imports included
    reset_s: float = 15.0  # assumed: an elastic framework's re-initialisation inside live processes
    storage_rate: float = 1e9  # assumed, bytes per second and worker, to persistent storage
    host_rate: float = 12e9  # assumed, bytes per second from accelerator to host memory
    mean_between_s: float = 1800.0  # assumed: what a user expects between failures, for the checkpoint interval

    @property
    def own_s(self) -> float:
        """From a worker's death to the next instruction under our runtime, without state copies."""
        return self.detection_s + self.regroup_s + self.communicators_s


def copy_s(size: float, bytes_per_us: float) -> float:
    """Seconds for ``size`` bytes of state over one link."""
    return size / bytes_per_us / 1e6
