"""The logical shape of a job, and who of it is alive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from recycle_plugin.core.ids import MicroBatch, Seat


@dataclass(frozen=True)
class Topology:
    """``replicas`` pipelines of ``stages`` stages; each replica brings ``micro_batches`` micro-batches a step.

    It never changes while the job runs: failures change the :class:`ClusterView`.
    """

    replicas: int
    stages: int
    micro_batches: int

    def __post_init__(self) -> None:
        for name in ("replicas", "stages", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"topology.{name} is {getattr(self, name)}: it has to be at least 1")

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        return tuple(Seat(replica, stage) for replica in range(self.replicas) for stage in range(self.stages))

    @cached_property
    def batch(self) -> tuple[MicroBatch, ...]:
        """All micro-batches of a step, in the order in which gradients of one worker are summed."""
        return tuple(MicroBatch(replica, index) for replica in range(self.replicas) for index in range(self.micro_batches))

    def full(self) -> ClusterView:
        return ClusterView(self, frozenset(self.seats))


@dataclass(frozen=True)
class ClusterView:
    """Who is alive: the input of planning that failures change."""

    topology: Topology
    live: frozenset[Seat]

    def __post_init__(self) -> None:
        strangers = self.live.difference(self.topology.seats)
        if strangers:
            raise ValueError(f"seats {', '.join(map(str, sorted(strangers)))} are outside the topology {self.topology}")

    def live_replicas(self, stage: int) -> tuple[int, ...]:
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> tuple[tuple[int, ...], ...]:
        replicas: list[list[int]] = [[] for _ in range(self.topology.stages)]
        for replica, stage in sorted(self.live):
            replicas[stage].append(replica)
        return tuple(map(tuple, replicas))

    def empty_stages(self) -> tuple[int, ...]:
        """Stages that no live worker holds: training can't go on from the survivors alone."""
        return tuple(stage for stage in range(self.topology.stages) if not self.live_replicas(stage))

    def without(self, *lost: Seat) -> ClusterView:
        return ClusterView(self.topology, self.live - set(lost))

    @property
    def lost(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.topology.seats if seat not in self.live)
