"""Profiles: what the parts of a model cost on a device, and from them the cost of each stage of a pipeline.

A profile is measured (``recycle profile``) or analytic (``lab.planner.analytic``); its title says which. JSON: the
fields of :class:`Profile`, parts and links as objects.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recycle_plugin.core.vocabulary.cost import MOST_BYTES, CostModel
from recycle_plugin.core.vocabulary.cut_text import shown
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes, stages_bytes
from recycle_plugin.core.vocabulary.worker_bytes import GRADIENT, STATE_BYTES, WorkerBytes

ORIGINS = ("measured", "analytic")
LINKS = ("inside", "across")
SEVERAL = 5  # missing and unknown keys that an error names
UNREADABLE = (ValueError, RecursionError)  # json's for text that it can't read, and for what is nested too deep
MEMORY = "memory"  # the key of a run's costs.json for the bytes of each stage


@dataclass(frozen=True)
class Wire:
    """A link between two workers: ``latency_us`` microseconds, and ``bytes_per_us`` bytes per microsecond (MB/s).
    Raises ValueError for a negative latency or no bandwidth.
    """

    latency_us: float
    bytes_per_us: float

    def __post_init__(self) -> None:
        if not (_is_number(self.latency_us) and _is_number(self.bytes_per_us) and self.bytes_per_us > 0):
            raise ValueError(
                f"a link of {shown(self.latency_us)} us and {shown(self.bytes_per_us)} bytes/us: write a latency of at "
                "least 0, and a bandwidth above 0"
            )

    def transfer_us(self, size: int) -> int:
        """Return the microseconds that one tensor of ``size`` bytes takes on an idle link."""
        return round(self.latency_us + size / self.bytes_per_us)


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer (or embedding, or head with its loss) for one micro-batch: microseconds, bytes, numbers.
    ``backward_us``: both gradients at once. ``activation_bytes``: held from F to I; ``pending_bytes``: from I to W.
    ``step_us``: optimizer step of its parameters. Raises ValueError for a value that is negative or not finite.
    """

    forward_us: float
    input_us: float
    weight_us: float
    backward_us: float
    step_us: float
    parameters: int
    activation_bytes: int
    pending_bytes: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not _is_number(value):
                raise ValueError(f"{name} is {shown(value)}: write a number from 0 to {MOST_BYTES}")

    @property
    def compute_us(self) -> float:
        """The microseconds of F, I and W together."""
        return self.forward_us + self.input_us + self.weight_us


@dataclass(frozen=True)
class Profile:
    """The costs of a model on a device: ``layers`` times ``layer`` between ``first`` (embedding) and ``last``.

    ``boundary_bytes``: one boundary tensor. ``gradient_bytes_each``: of a parameter's gradient on the wire. ``inside``,
    ``across``: links between workers of one host and of two; ``across`` carries the reduction. ``gpus_per_worker``: a
    tensor-parallel group shares one seat. ``device_bytes``: memory of a worker's device for state and activations; None
    if the file has none. ``assumptions``: what was not measured. Raises ValueError for an unknown origin or dtype, and
    for a size that is no whole number of at least 1.
    """

    name: str
    origin: str
    device: str
    date: str
    command: str
    dtype: str
    micro_batch: int
    sequence: int
    checkpointing: bool
    layers: int
    first: LayerProfile
    layer: LayerProfile
    last: LayerProfile
    boundary_bytes: int
    gradient_bytes_each: int
    inside: Wire
    across: Wire
    gpus_per_worker: int = 1
    device_bytes: int | None = None
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "origin", "device", "date", "command", "dtype"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name} is {shown(value)}: write a text")
        if not isinstance(self.checkpointing, bool):
            raise ValueError(f"checkpointing is {shown(self.checkpointing)}: write true or false")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin is {self.origin!r}: one of {', '.join(ORIGINS)}")
        if self.dtype not in STATE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}: one of {', '.join(STATE_BYTES)}")
        for name in (
            "micro_batch",
            "sequence",
            "layers",
            "boundary_bytes",
            "gradient_bytes_each",
            "gpus_per_worker",
            "device_bytes",
        ):
            value = getattr(self, name)
            if (type(value) is not int or not 1 <= value <= MOST_BYTES) and (
                name != "device_bytes" or value is not None
            ):
                raise ValueError(f"{name} is {shown(value)}: write a whole number, from 1 to {MOST_BYTES}")

    @property
    def title(self) -> str:
        """One line about the profile that names its origin."""
        saved = ", activation checkpointing" if self.checkpointing else ""
        return (
            f"{self.name}, {self.dtype}, micro-batch {self.micro_batch}{saved}; "
            f"{self.origin.upper()}: {self.device}, {self.date}"
        )

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

    def costs(self, stages: int, replicas: int, fused: bool = False) -> CostModel:
        """Return the cost model of ``stages`` stages, each summed over ``replicas`` workers by a ring. ``fused``: B as
        measured; otherwise I + W. Each worker has a host of its own.
        """
        rows = self.parts(stages)

        def each(name: str) -> tuple[int, ...]:
            return tuple(round(sum(getattr(part, name) for part in row)) for row in rows)

        gradients = [
            self.gradient_bytes_each * sum(part.parameters for part in row) // self.gpus_per_worker for row in rows
        ]
        return CostModel(
            each("forward_us"),
            each("input_us"),
            each("weight_us"),
            communication=self.across.transfer_us(self.boundary_bytes),
            reduce=tuple(ring_us(self.across, size, replicas) for size in gradients),
            step=each("step_us"),
            backward=each("backward_us") if fused else (),
            activation_bytes=each("activation_bytes"),
            pending_bytes=each("pending_bytes"),
        )

    def state_bytes(self, stages: int) -> tuple[int, ...]:
        """Return the bytes per stage that a copy of a worker moves: parameters, Adam's state and one gradient."""
        return tuple(
            STATE_BYTES[self.dtype] * sum(part.parameters for part in row) // self.gpus_per_worker
            for row in self.parts(stages)
        )

    def parameters(self, stages: int) -> tuple[int, ...]:
        return tuple(sum(part.parameters for part in row) // self.gpus_per_worker for row in self.parts(stages))

    def worker_bytes(
        self, stages: int, undo: str, blocks: int | None = None, scales: bool = False
    ) -> tuple[WorkerBytes, ...]:
        """Return what a worker of each stage holds for its parameters, by the settings of its job. It is assumed to
        compute on an accelerator, where torch's optimizers work on all parameters at once.
        """
        return tuple(
            WorkerBytes(count, self.dtype, undo, blocks, scales, work=GRADIENT * count, apart=True)
            for count in self.parameters(stages)
        )

    def working_bytes(self, stages: int) -> tuple[int, ...]:
        """Return an estimate of the bytes per stage that a running instruction needs on top. While a part's I runs,
        what the part holds before and after it exists at once, with the boundary tensors that come and go.
        """
        return tuple(
            max(part.activation_bytes + part.pending_bytes for part in row) + 2 * self.boundary_bytes
            for row in self.parts(stages)
        )


def ring_us(wire: Wire, size: int, members: int) -> int:
    """Return the microseconds of a ring all-reduce of ``size`` bytes: 2 (n - 1) / n of them in 2 (n - 1) hops."""
    if members < 2:
        return 0
    return round(2 * (members - 1) * (wire.latency_us + size / members / wire.bytes_per_us))


def write(profile: Profile, path: str | Path) -> None:
    """Write ``profile`` to the file ``path`` as JSON. Raises OSError."""
    Path(path).write_text(json.dumps(asdict(profile), indent=1) + "\n")


def read(path: str | Path) -> Profile:
    """Return the profile in the JSON file ``path``. Raises OSError, or ValueError that names the file and mistake."""
    try:
        return _profile(json.loads(Path(path).read_text()))
    except UNREADABLE as error:
        raise ValueError(f"{path} is no profile: {error}") from None


def read_measured(path: str | Path) -> tuple[Profile | CostModel, tuple[StageBytes, ...]]:
    """Return the profile in the JSON file ``path``, or the stages' :class:`CostModel`, and the measured bytes of each
    stage, if the file has them. Raises as :func:`read`.
    """
    try:
        found = json.loads(Path(path).read_text())
        if not isinstance(found, dict) or "forward" not in found:
            return _profile(found), ()
        memory = found.pop(MEMORY, None)
        costs = _costs(found)
        if memory is None:
            return costs, ()
        if not (costs.activation_bytes and costs.pending_bytes):
            raise ValueError(f"{MEMORY} needs activation_bytes and pending_bytes")
        return costs, stages_bytes(memory, costs.stages)
    except UNREADABLE as error:
        raise ValueError(f"{path} has no costs: {error}") from None


def _costs(found: dict[str, Any]) -> CostModel:
    given: dict[str, Any] = {}
    for field in _expected(CostModel, found):
        value = found[field.name]
        if field.type.startswith("tuple"):
            if not isinstance(value, list):
                raise ValueError(f"{field.name} is {shown(value)}: write a list with a number for each stage")
            value = tuple(value)
        given[field.name] = value
    if not given["forward"]:
        raise ValueError("forward is empty: write a list with a number for each stage")
    return CostModel(**given)


def _profile(found: Any) -> Profile:
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    _expected(Profile, found)
    kinds: dict[str, type] = dict.fromkeys(("first", "layer", "last"), LayerProfile) | dict.fromkeys(LINKS, Wire)
    parts = {}
    for name, kind in kinds.items():
        if not isinstance(found[name], dict):
            raise ValueError(f"{name} is {shown(found[name])}: write an object")
        try:
            _expected(kind, found[name])
            parts[name] = kind(**found[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    assumptions = found.get("assumptions", [])
    if not isinstance(assumptions, list) or not all(isinstance(each, str) for each in assumptions):
        raise ValueError(f"assumptions is {shown(assumptions)}: write a list of texts")
    return Profile(**{**found, **parts, "assumptions": tuple(assumptions)})


def _expected(kind: type, found: dict[str, Any]) -> list[Field[Any]]:
    """Return the fields of ``kind`` that ``found`` has. Raises ValueError if it lacks one, or has another key."""
    known = [field for field in fields(kind) if field.name != "slowness"]  # measured anew in each run
    names = {field.name for field in known}
    wrong = [f"no {each.name}" for each in known if each.default is MISSING and each.name not in found]
    if wrong := wrong + [f"unknown key {shown(name)[1:-1]}" for name in found if name not in names]:
        raise ValueError(", ".join(wrong[:SEVERAL]))
    return [field for field in known if field.name in found]


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a number from 0 to MOST_BYTES; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_BYTES
