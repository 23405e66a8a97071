"""Fault-scaled: the fault-free throughput times the share of live workers. A yardstick, not a system."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange, count_after


@dataclass(frozen=True)
class FaultScaled:
    """The policy that loses no more than its workers. ``fault_free``: samples per second with ``workers`` workers."""

    fault_free: float
    workers: int
    name: str = "fault-scaled"
    source: str = "ReCycle (SOSP'24), by definition; free transitions"
    validated: str = "by definition: 23/24 = .958 ... 15/24 = .625 as published"

    def start(self) -> int:
        """Return the state of the whole cluster."""
        return self.workers

    def speed(self, state: int) -> float:
        """Return the samples per second with ``state`` workers."""
        return self.fault_free * state / self.workers

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        """Return the next state, and the change, which is free."""
        return count_after(state, change), PeerTransition(0.0, 0.0, "free")
