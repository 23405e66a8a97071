"""What a cluster costs besides computing: seconds and bytes per second, each with where it comes from.

Written down before any comparison was run, and not changed to meet a published point.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """An analytic accelerator; defaults are an A100-40GB behind 80 Gbit/s (papers.md section 1) [read], the rest assumed.

    ``efficiency``: of the peak that matrix products reach.  ``dispatch_us``: fixed cost of one instruction.
    ``latency_us``: of one message.  ``memory_rate``: what the optimizer's update runs at, bytes per second.
    """

    name: str = "A100-40GB, analytic"
    peak_flops: float = 312e12  # bf16, dense: data sheet
    efficiency: float = 0.5  # assumed; Megatron SC'21 reports 44 to 52% of peak
    memory_bytes: float = 40 * 2.0**30
    memory_rate: float = 1.5e12  # data sheet: 1.555e12
    link_rate: float = 10e9  # 80 Gbit/s
    latency_us: int = 50  # assumed
    dispatch_us: int = 20  # assumed


@dataclass(frozen=True)
class Transitions:
    """What changes cost.  Measured here: scripts/bench_recovery.py, 2 x 2 CPU workers, Gloo, medians.  The rest is assumed."""

    detection_s: float = 0.017  # measured
    regroup_s: float = 0.033  # measured: agreement and planning, and what the benchmark can't attribute
    communicators_s: float = 3.0  # assumed: new NCCL communicators on all GPUs; Gloo needs nothing comparable
    restart_s: float = 60.0  # assumed: end and start of all processes, framework imports included
    reset_s: float = 15.0  # assumed: an elastic framework's re-initialisation inside live processes
    storage_rate: float = 1e9  # assumed, bytes per second and worker, to persistent storage
    host_rate: float = 12e9  # assumed, bytes per second from accelerator to host memory
    checkpoint_every_s: float = 600.0  # assumed, for restart from a checkpoint

    @property
    def own_s(self) -> float:
        """From a worker's death to the next instruction under our runtime, without state copies."""
        return self.detection_s + self.regroup_s + self.communicators_s
