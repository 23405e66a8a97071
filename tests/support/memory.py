"""Jobs whose memory is measured (tests/jobs/memory.py), and what the formula says of them: a table of settings.

Layers are wide and micro-batches small, so that nearly all memory is the parameters'.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.stage_bytes import StageBytes
from recycle_plugin.core.vocabulary.worker_bytes import GRADIENT, WorkerBytes
from tests.support.cluster import ForkServer, Run
from tests.support.jobs import DEEPSPEED, PLAIN, STANDIN, Shape, Vehicle

STEP = 4  # that is measured: buffers and the optimizer's state are there
DEADLINE_S = 120.0
MOMENTS = {"computing": ("F", "I", "W", "B"), "summing": ("REDUCE",), "stepping": ("STEP",)}
WIDE = (Shape(2, 1, 2), ("model.width=640", "model.layers=1"))
SIZES = {
    PLAIN: WIDE,
    STANDIN: WIDE,
    DEEPSPEED: (Shape(2, 2, 2), ("model.hidden=512", "model.layers=2", "save_parameters=false")),
}


@dataclass(frozen=True)
class Case:
    """A job by its settings; ``blocks``: exact mode's, of each worker."""

    vehicle: Vehicle = PLAIN
    dtype: str = "fp32"
    undo: str = "snapshot"
    clipped: bool = False
    blocks: int | None = None

    def overrides(self) -> list[str]:
        found = [f"recycle.undo={self.undo}", f"gradient_clipping={0.001 if self.clipped else 0.0}"]
        found += [] if self.dtype == "fp32" else [f"deepspeed={{{self.dtype}: {{enabled: true}}}}"]
        return found + ([f"recycle.exact={2 // self.blocks}"] if self.blocks else [])

    def __str__(self) -> str:
        parts = [
            "stand-in" * (self.vehicle is STANDIN),
            self.dtype,
            self.undo,
            "clipped" * self.clipped,
            f"exact, {self.blocks} blocks" * bool(self.blocks),
        ]
        return ", ".join(filter(None, parts))


CASES = (
    Case(),
    Case(clipped=True),
    Case(undo="host_snapshot"),
    Case(undo="inverse"),
    Case(DEEPSPEED, "bf16"),
    Case(DEEPSPEED, "bf16", "inverse", clipped=True),
    Case(STANDIN),
    Case(STANDIN, undo="host_snapshot"),
    Case(STANDIN, undo="inverse", clipped=True),
    Case(STANDIN, blocks=1),
    Case(STANDIN, blocks=2),
)


@dataclass(frozen=True)
class Comparison:
    """Bytes of a worker at a moment: by the formula, and measured."""

    case: Case
    seat: str
    parameters: int
    moment: str
    expected: int
    found: int

    @property
    def apart(self) -> float:
        """By how much of the measured bytes the formula is off."""
        return abs(self.expected - self.found) / self.found


def measured(server: ForkServer, folder: Path, case: Case) -> list[dict]:
    """Run the job; what each worker has measured, and as ``said`` what it says of its stage by itself."""
    shape, sizes = SIZES[case.vehicle]
    more = [*sizes, f"steps={STEP + 1}", *case.overrides()]
    plan = {"script": case.vehicle.script, "folder": str(folder / "memory"), "step": STEP}
    job = Run(
        server,
        folder,
        shape.ranks,
        "tests/jobs/memory.py",
        case.vehicle.arguments(shape, folder, *more),
        launcher="plain",
        RECYCLE_TEST_MEMORY=json.dumps(plan),
    )
    try:
        result = job.finish(DEADLINE_S)
    finally:
        left = job.clean()
    files = sorted((folder / "memory").glob("rank*.json"))
    assert result.code == 0 and len(files) == shape.ranks and not left, result.output[-6000:]
    said = {event["stage"]: event for event in result.of("memory")}
    found = [json.loads(path.read_text()) for path in files]
    return [each | {"said": said[Seat.parse(each["seat"]).stage]} for each in found]


def compared(case: Case, found: dict) -> Iterator[Comparison]:
    """What the formula says of a worker, beside what it has measured."""
    apart = case.vehicle is STANDIN
    yield from _beside(case, found, WorkerBytes(found["parameters"], case.dtype, *_settings(case), apart=apart))


def compared_as_said(case: Case, found: dict) -> Iterator[Comparison]:
    """The same of what the worker says of its stage by itself, with which the formula goes on."""
    said = StageBytes(**{field.name: found["said"][field.name] for field in fields(StageBytes)})
    yield from _beside(case, found, WorkerBytes.of_run(said, *_settings(case)))


def _settings(case: Case) -> tuple[str, int | None, bool]:
    return case.undo, case.blocks, case.clipped


def _beside(case: Case, found: dict, worker: WorkerBytes) -> Iterator[Comparison]:
    """torch's Adam takes two of the largest parameter for itself, since layers' weights come one by one, and a weight
    gradient of its size is made before it is added.  Steps were settled, so that the last sum is gone.
    """
    largest = GRADIENT * found["largest"]
    worker = replace(worker, work=2 * largest)
    expected = {
        "settled": sum(worker.settled.values()),
        "between": sum(worker.between.values()),
        **worker.peaks(largest, committed=True),
    }
    counted = {moment: sum(found[moment].values()) for moment in ("settled", "between")}
    counted |= {moment: max(found["peaks"].get(op, 0) for op in ops) for moment, ops in MOMENTS.items()}
    for moment, size in expected.items():
        yield Comparison(case, found["seat"], found["parameters"], moment, size, counted[moment])
