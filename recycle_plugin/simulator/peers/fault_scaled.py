"""Fault-scaled: the fault-free throughput times the part of the workers that live.  A yardstick, not a system."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.simulator.peers.policy import PeerTransition, WorkersChange, count_after


@dataclass(frozen=True)
class FaultScaled:
    """``fault_free`` in samples per second with ``workers`` workers."""

    fault_free: float
    workers: int
    name: str = "fault-scaled"
    source: str = "ReCycle (SOSP'24), by definition; free transitions"
    validated: str = "by definition: 23/24 = .958 ... 15/24 = .625 as published"

    def start(self) -> int:
        return self.workers

    def speed(self, state: int) -> float:
        return self.fault_free * state / self.workers

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        return count_after(state, change), PeerTransition(0.0, 0.0, "free")
