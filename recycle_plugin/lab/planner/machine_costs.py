"""The costs of a change of the membership on a machine, in microseconds, with their source."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recycle_plugin.core.coordinator.recovery_ways import START_UP_S
from recycle_plugin.lab.planner.profile import Wire


@dataclass(frozen=True)
class MachineCosts:
    """The costs of changes on one machine, in microseconds. ``detection_us``: from a death until all workers know.

    ``regroup_us``: from the last worker's stop until all go on, without ``plan_us`` for the new plan. ``undo_us``:
    taking a step back. ``commit_us``: from the last worker's step until all know of the commit. ``return_us``: from a
    worker's return until it has its framework, before it copies a state over ``copy``; meanwhile the others go on.
    ``source``: who measured this, where and when.
    """

    detection_us: int
    regroup_us: int
    plan_us: int
    undo_us: int
    commit_us: int
    return_us: int
    copy: Wire
    source: str

    @property
    def pause_us(self) -> int:
        """The microseconds that every change of the membership costs, whatever the reason."""
        return self.regroup_us + self.plan_us


LOCAL = MachineCosts(
    detection_us=20_000,
    regroup_us=15_000,
    plan_us=2_000,
    undo_us=0,
    commit_us=1_000,
    return_us=round(START_UP_S * 1e6),
    copy=Wire(30, 9_000),
    source=(
        "detection, regrouping, planning: medians of scripts/bench_recovery.py, 40 SIGKILLs at random instants, 2x2 "
        "and 4x2 workers, Gloo, "
        "2 busy cores, 2026-11-21 (regrouping without the instruction that a worker finishes first); no state was "
        "large enough to show an undo; "
        "ASSUMED, for models of ordinary size: 9 s from respawn to ready (measured with small ones: 4 to 8 s, "
        "scripts/demo --scenario rejoin and scripts/bench_recovery.py --against torchft), state copied at 9 GB/s"
    ),
)
"""The only machine on which the runtime has been measured so far."""

CLUSTER = replace(
    LOCAL,
    regroup_us=LOCAL.regroup_us + 3_000_000,
    source=f"ASSUMED: 3 s to open NCCL communicators at every change, on top of what follows; {LOCAL.source}",
)
"""A cluster of GPUs, until one has been measured."""


def by_name(name: str) -> MachineCosts:
    """Return the costs of the machine ``name``: local, cluster or free. Raises ValueError for an unknown name."""
    known = {
        "local": LOCAL,
        "cluster": CLUSTER,
        "free": MachineCosts(0, 0, 0, 0, 0, 0, Wire(0, 1e12), "changes cost nothing: the limit is the schedule alone"),
    }
    if name not in known:
        raise ValueError(f"machine {name!r}: one of {', '.join(known)}")
    return known[name]
