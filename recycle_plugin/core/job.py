"""What the coordinator has to know of a run: the same on every worker, or they can't train together."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import UnionType
from typing import Any, get_origin, get_type_hints

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.ids import Seat
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.topology import Topology


@dataclass(frozen=True)
class Job:
    """As its workers ask for it; the ``start`` event shows it to the user, field by field.

    ``batch``: samples in a step of all replicas.  ``clipping``: the limit of the gradient norm, 0 for none.  ``arithmetic``: in exact mode, what
    decides how operations round.  Times are in seconds.  The others are the settings of the same name.
    """

    replicas: int
    stages: int
    micro_batches: int
    ties: tuple[tuple[int, ...], ...]
    run_dir: str
    costs: CostModel
    policy: Policy
    regroup_timeout_s: float = 120.0
    progress_timeout_s: float = inf
    idle_timeout_s: float = inf
    heartbeat_timeout_s: float = inf
    strict_placement: bool = False
    batch: int = 0
    max_slowdown: float | None = None
    report: bool = False
    rebalance: bool = False
    stagger_optimizer: bool = True
    clipping: float = 0.0
    clip: str = "sync"
    nonfinite: str = "end"
    norm: str = "True"
    loss_scaling: bool = False
    undo: str = "snapshot"
    keep_bytes: int | None = None
    rng: str = "keyed"
    seed: int = 0
    exact: bool = False
    arithmetic: str | None = None

    @property
    def shape(self) -> Topology:
        return Topology(self.replicas, self.stages, self.micro_batches, self.ties)

    @classmethod
    def decode(cls, record: dict) -> Job:
        """Inverse of ``asdict``, over JSON.  ValueError names what is missing, unknown, or of another type."""
        known = get_type_hints(cls)
        for name in sorted(record.keys() ^ known.keys()):
            raise ValueError(f"job.{name} is {'missing' if name in known else 'unknown'}: all workers need the same version of the plugin")
        values = as_tuples(record)
        for name, kind in (("costs", costs_of), ("policy", policy_of)):
            try:
                values[name] = kind(record[name])
            except (TypeError, KeyError, ValueError) as error:
                raise ValueError(f"job.{name} is {record[name]!r}: {error}") from error
        for name, hint in known.items():
            if not _is(values[name], hint):
                raise ValueError(f"job.{name} is {record[name]!r}, and it has to be {getattr(hint, '__name__', hint)}")
        return cls(**values)


def costs_of(record: dict) -> CostModel:
    """Inverse of ``asdict``, over JSON."""
    known = as_tuples(record)
    return CostModel(**known | {"slowness": tuple((Seat(*seat), percent) for seat, percent in known["slowness"])})


def policy_of(record: dict) -> Policy:
    """Inverse of ``asdict``, over JSON."""
    return Policy(**as_tuples(record))


def as_tuples(record: Any) -> Any:
    """What JSON has made lists of."""
    if isinstance(record, dict):
        return {name: as_tuples(value) for name, value in record.items()}
    return tuple(map(as_tuples, record)) if isinstance(record, (list, tuple)) else record


def _is(value: Any, hint: Any) -> bool:
    """Whether ``value`` is what a field's annotation says; a whole number is a float too, and a flag is no number."""
    kinds = (hint.__args__ if isinstance(hint, UnionType) else (get_origin(hint) or hint,))
    return type(value) in kinds or float in kinds and type(value) is int
