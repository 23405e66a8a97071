"""The costs of a change of the membership on a machine, with where the figures come from."""

from __future__ import annotations

from dataclasses import dataclass

START_UP_S = 9.0  # of a process until its model is ready, as long as nobody has measured it: 4 to 8 s with small models


@dataclass(frozen=True)
class MachineCosts:
    """The costs of changes on one machine, in microseconds.

    ``detection_us``: from a death to everybody's knowing; ``pause_us``: from the last worker's stop to everybody's
    going on, with the new plan.
    """

    detection_us: int
    pause_us: int


LOCAL = MachineCosts(20_000, 17_000)
"""The only machine on which the runtime has been measured so far: medians of scripts/bench_recovery.py, 40 SIGKILLs at
random instants, 2x2 and 4x2 workers, Gloo, 2 busy cores, 2026-11-21 (without the instruction that a worker finishes
first).
"""

CLUSTER = MachineCosts(LOCAL.detection_us, LOCAL.pause_us + 3_000_000)
"""A cluster of GPUs, until one has been measured: ASSUMED, 3 s to open NCCL communicators at every change."""
