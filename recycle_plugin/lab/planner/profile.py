"""Profiles: what the parts of a model cost on a device, and from them the cost of each stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.stage_bytes import HOST, StageBytes
from recycle_plugin.core.vocabulary.worker_bytes import ADAM, GRADIENT, MASTERS, WEIGHTS

STATE_BYTES = WEIGHTS["bf16"] + MASTERS["bf16"] + ADAM + GRADIENT
"""Of a parameter with Adam and one gradient: what training without this plugin takes too."""


@dataclass(frozen=True)
class Wire:
    """A link between two workers: ``latency_us`` microseconds, and ``bytes_per_us`` bytes per microsecond (MB/s)."""

    latency_us: float
    bytes_per_us: float

    def transfer_us(self, size: int) -> int:
        """Return the microseconds that one tensor of ``size`` bytes takes on an idle link."""
        return round(self.latency_us + size / self.bytes_per_us)


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer (or embedding, or head with its loss) for one micro-batch: microseconds, bytes, numbers.
    ``activation_bytes``: held from F to I; ``pending_bytes``: from I to W. ``step_us``: optimizer step of its
    parameters.
    """

    forward_us: float
    input_us: float
    weight_us: float
    step_us: float
    parameters: int
    activation_bytes: int
    pending_bytes: int

    @property
    def compute_us(self) -> float:
        """The microseconds of F, I and W together."""
        return self.forward_us + self.input_us + self.weight_us


@dataclass(frozen=True)
class Profile:
    """The costs of a model on a device: ``layers`` times ``layer`` between ``first`` (embedding) and ``last``.

    ``boundary_bytes``: one boundary tensor. ``across``: the link between workers, which carries the reduction too.
    ``gpus_per_worker``: a tensor-parallel group shares one seat. ``source``: who says so.
    """

    name: str
    source: str
    micro_batch: int
    checkpointing: bool
    layers: int
    first: LayerProfile
    layer: LayerProfile
    last: LayerProfile
    boundary_bytes: int
    across: Wire
    gpus_per_worker: int = 1

    @property
    def title(self) -> str:
        """One line about the profile that names its source."""
        saved = ", activation checkpointing" if self.checkpointing else ""
        return f"{self.name}, bf16, micro-batch {self.micro_batch}{saved}; {self.source}"

    def split(self, stages: int) -> tuple[int, ...]:
        """Return the number of transformer layers of each stage. Layers are dealt one by one to the least loaded stage,
        embedding and head counted. Raises ValueError for too many ``stages``.
        """
        if self.layers < stages:
            raise ValueError(f"{self.layers} layers for {stages} stages: a stage needs at least one layer")
        load = [self.layer.compute_us] * stages
        load[0] += self.first.compute_us
        load[-1] += self.last.compute_us
        count = [1] * stages
        for _ in range(self.layers - stages):
            least = min(range(stages), key=lambda stage: (load[stage], stage))
            count[least] += 1
            load[least] += self.layer.compute_us
        return tuple(count)

    def parts(self, stages: int) -> tuple[tuple[LayerProfile, ...], ...]:
        """Return the layers of each stage, with embedding and head. Raises ValueError for too many ``stages``."""
        rows = [(self.layer,) * count for count in self.split(stages)]
        rows[0] = (self.first, *rows[0])
        rows[-1] = (*rows[-1], self.last)
        return tuple(rows)

    def costs(self, stages: int, replicas: int) -> CostModel:
        """Return the cost model of ``stages`` stages, each summed over ``replicas`` workers by a ring. Each worker has
        a host of its own.
        """
        rows = self.parts(stages)

        def each(name: str) -> tuple[int, ...]:
            return tuple(round(sum(getattr(part, name) for part in row)) for row in rows)

        gradients = [GRADIENT * sum(part.parameters for part in row) // self.gpus_per_worker for row in rows]
        return CostModel(
            each("forward_us"),
            each("input_us"),
            each("weight_us"),
            communication=self.across.transfer_us(self.boundary_bytes),
            reduce=tuple(ring_us(self.across, size, replicas) for size in gradients),
            step=each("step_us"),
            activation_bytes=each("activation_bytes"),
            pending_bytes=each("pending_bytes"),
        )

    def state_bytes(self, stages: int) -> tuple[int, ...]:
        """Return the bytes per stage that a copy of a worker moves: parameters, Adam's state and one gradient."""
        return tuple(each.state + each.gradient for each in self.memory(stages))

    def memory(self, stages: int) -> tuple[StageBytes, ...]:
        """Return the memory of each stage with Adam in bf16, without its device's."""
        counts = [sum(part.parameters for part in row) // self.gpus_per_worker for row in self.parts(stages)]
        w, m, boundary = WEIGHTS["bf16"], MASTERS["bf16"], self.boundary_bytes
        return tuple(
            StageBytes(w * n, m * n, ADAM * n, 0, GRADIENT * n, 0, boundary, HOST, 0, 0, self.micro_batch)
            for n in counts
        )


def ring_us(wire: Wire, size: int, members: int) -> int:
    """Return the microseconds of a ring all-reduce of ``size`` bytes: 2 (n - 1) / n of them in 2 (n - 1) hops."""
    if members < 2:
        return 0
    return round(2 * (members - 1) * (wire.latency_us + size / members / wire.bytes_per_us))
