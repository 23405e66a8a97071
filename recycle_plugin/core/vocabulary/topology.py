"""The logical shape of a job, and which of its seats are live.

Stages that share a weight (DeepSpeed's ``TiedLayerSpec``) form a *tie*. Each has a copy of the weight; the copies stay
equal because all stages apply the same gradient, the sum of what each stage's REDUCE has left. TIE makes this sum, one
joint event of all live workers of the tie's stages, between REDUCE and STEP. It adds stages' sums, not contributions:

* Every live worker of a stage has the stage's sum before TIE begins, and keeps it until the commit. So whoever dies,
  the sum can be made again from any one survivor of each stage, with the same bits, since stages are added in order. No
  instruction runs again because of a tie: if a worker lacks the result, all make it again
  (core/vocabulary/recovery_plan.py).
* Nobody has the result before all have come to TIE. So a worker that has applied it can rely on every stage's sum.
* The stage's one STEP applies its own and its tied weights together, as DeepSpeed's optimizer does. A tied weight is
  committed with the step, whose commit waits for all stages anyway.

The cost: a tie's stages step only when the last of them has its sum. Planner, lower bound and verifier count with that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from recycle_plugin.core.vocabulary.ids import MicroBatch, Seat


@dataclass(frozen=True)
class Topology:
    """The logical shape of a job: ``replicas`` pipelines of ``stages`` stages; each has ``micro_batches`` a step.

    It never changes while the job runs: failures change the :class:`ClusterView`. ``ties``: stages that share weights,
    each stage in at most one tie, in ascending order (:func:`tied`). Raises ValueError for other values.
    """

    replicas: int
    stages: int
    micro_batches: int
    ties: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("replicas", "stages", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"topology.{name} is {getattr(self, name)}: it has to be at least 1")
        if self.ties != tied(self.ties) or any(not 0 <= stage < self.stages for tie in self.ties for stage in tie):
            raise ValueError(
                f"topology.ties is {self.ties}: sets of two or more of the stages 0 to {self.stages - 1}, none in two "
                "of them, all in order"
            )

    @property
    def text(self) -> str:
        """Return the shape in words, as "2 replicas of 3 stages, 1 micro-batch each"."""
        return (
            f"{self.replicas} replica{'s' * (self.replicas > 1)} of {self.stages} stage{'s' * (self.stages > 1)}, "
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} each"
        )

    def tie(self, stage: int) -> tuple[int, ...]:
        """Return the stages with which ``stage`` shares weights, itself included; empty if it shares none."""
        return next((tie for tie in self.ties if stage in tie), ())

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """All seats of the job, replica by replica."""
        return tuple(Seat(replica, stage) for replica in range(self.replicas) for stage in range(self.stages))

    @cached_property
    def batch(self) -> tuple[MicroBatch, ...]:
        """All micro-batches of a step, in the order in which one worker's gradients are summed."""
        return tuple(
            MicroBatch(replica, index) for replica in range(self.replicas) for index in range(self.micro_batches)
        )

    @cached_property
    def batch_names(self) -> frozenset[str]:
        return frozenset(map(str, self.batch))

    def full(self) -> ClusterView:
        return ClusterView(self, frozenset(self.seats))


@dataclass(frozen=True)
class ClusterView:
    """The seats that are live: the input of planning that failures change. Raises ValueError for an unknown seat."""

    topology: Topology
    live: frozenset[Seat]

    def __post_init__(self) -> None:
        strangers = self.live.difference(self.topology.seats)
        if strangers:
            raise ValueError(f"seats {', '.join(map(str, sorted(strangers)))} are outside the topology {self.topology}")

    def live_replicas(self, stage: int) -> tuple[int, ...]:
        """Return the replicas whose worker of ``stage`` is live, in ascending order."""
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> tuple[tuple[int, ...], ...]:
        replicas: list[list[int]] = [[] for _ in range(self.topology.stages)]
        for replica, stage in sorted(self.live):
            replicas[stage].append(replica)
        return tuple(map(tuple, replicas))

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The replicas whose seats are all live, in ascending order."""
        counts = Counter(seat.replica for seat in self.live)
        return tuple(sorted(replica for replica, count in counts.items() if count == self.topology.stages))

    def empty_stages(self) -> tuple[int, ...]:
        """Return the stages that no live worker holds: training can't go on from the survivors alone."""
        return tuple(stage for stage in range(self.topology.stages) if not self.live_replicas(stage))

    def without(self, *lost: Seat) -> ClusterView:
        """Return the view that is left when the seats ``lost`` are gone."""
        return ClusterView(self.topology, self.live - set(lost))

    def lost_share(self, gone: Iterable[Seat]) -> float:
        """Return the share of a step's work so far that ``gone`` take with them, on the stage that loses most."""
        counts = Counter(seat.stage for seat in gone)
        return max((count / len(self.live_replicas(stage)) for stage, count in counts.items()), default=0.0)

    @property
    def lost(self) -> tuple[Seat, ...]:
        """The seats that are not live, replica by replica."""
        return tuple(seat for seat in self.topology.seats if seat not in self.live)


def tied(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the ties of a job, given the stages that share each weight: groups with a common stage are one tie."""
    ties: list[set[int]] = []
    for group in map(set, groups):
        ties = [tie for tie in ties if not tie & group] + [group.union(*(tie for tie in ties if tie & group))]
    return tuple(sorted(tuple(sorted(tie)) for tie in ties if len(tie) > 1))
