"""The jobs that the cluster tests run, as overrides of scripts/train_gpt.py, and what "the same training" means."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isnan
from pathlib import Path

import pytest
import torch

from recycle_plugin.core.vocabulary.instruction import COMPUTE, Op
from recycle_plugin.core.vocabulary.span import Span
from tests.support.cluster import ROOT, Result, Run

TRAIN = "scripts/train_gpt.py"
WRAPPED = "tests/jobs/gpt.py"  # the same, changed from outside: see tests/jobs/wrappers/
CHECKPOINT = "tests/jobs/checkpoint.py"  # the same, with checkpoints and evaluations on the way
COUNT = "tests/jobs/count.py"  # counts by the weights how often each sample is used
STEPS = 20
LOSS_TOLERANCE = 5e-6
PARAMETER_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Shape:
    """Replicas × stages with ``micro_batches`` each; ``layers`` transformer layers (the pipeline has two more)."""

    replicas: int = 2
    stages: int = 2
    micro_batches: int = 2
    layers: int = 2

    @property
    def ranks(self) -> int:
        return self.replicas * self.stages

    def overrides(self) -> list[str]:
        """The smallest GPT on it, with dropout and Adam: a step takes about 25 ms."""
        return [
            f"topology.replicas={self.replicas}",
            f"topology.stages={self.stages}",
            f"topology.micro_batches={self.micro_batches}",
            f"model.layers={self.layers}",
            "model.hidden=16",
            "model.heads=2",
            "model.sequence=16",
            "micro_batch_size=1",
            "data.limit_bytes=100000",
            f"steps={STEPS}",
            "recycle.enabled=true",
            "recycle.report=false",
            "recycle.rebalance=false",  # no bit is to depend on how busy the machine is
            "save_parameters=true",
        ]


@dataclass(frozen=True)
class Emulated(Shape):
    """Layers whose F, I and W take ``each_ms``, so that two cores are enough for many workers."""

    each_ms: float = 20

    def overrides(self) -> list[str]:
        times = [f"model.{name}_ms={self.each_ms}" for name in ("forward", "input", "weight")]
        shape = [f"topology.{name}={getattr(self, name)}" for name in ("replicas", "stages", "micro_batches")]
        return ["model=emulated", "optimizer=sgd", *times, *shape, f"steps={STEPS}", "recycle.enabled=true"]


BF16 = "deepspeed={bf16: {enabled: true}}"
SQUARE = Shape()
NOBODY: frozenset[str] = frozenset()


def faults(*texts: str) -> str:
    return "recycle.faults=[" + ",".join(f'"{text}"' for text in texts) + "]"


def held(folder: Path, step: int, until: str, first: str = "0F0.0") -> dict:
    """The change to a job (tests/jobs/wrappers/) by which nobody goes on from ``first`` of ``step`` before the test has
    made the file ``until`` in ``folder``.
    """
    return {"name": "gate", "folder": str(folder), "before": f"{first}@{step}", "until": "", "by": [until]}


def in_halves(spans: Iterable[Span]) -> list[str]:
    """The computations of a trace, in which a backward that was not split counts as its I and its W."""
    found: list[str] = []
    for one in (span.instruction for span in spans if span.instruction.op in COMPUTE):
        found += map(str, (replace(one, op=Op.I), replace(one, op=Op.W)) if one.op is Op.B else (one,))
    return found


def after_step(run: Run, step: int) -> None:
    run.wait_for(
        lambda: any(event["event"] == "committed" and event["step"] >= step for event in run.events()),
        f"commit of step {step}",
    )


def hold(folder: Path) -> dict[str, object]:
    """The change (tests/jobs/wrappers/) by which the job does not end before there is the file ``folder``/go."""
    return {"name": "gate", "folder": str(folder), "before": f"0F0.0@{STEPS - 2}", "until": "", "by": ["go"]}


@dataclass(frozen=True)
class Difference:
    """Of two trainings: the largest difference of a step's loss, and ‖Δ‖/‖p‖ over all parameters."""

    loss: float
    parameters: float

    @property
    def tolerated(self) -> bool:
        return self.loss <= LOSS_TOLERANCE and self.parameters <= PARAMETER_TOLERANCE

    @property
    def none(self) -> bool:
        return self.loss == self.parameters == 0.0

    def exceeds(self, times: float) -> bool:
        return self.loss > times * LOSS_TOLERANCE or self.parameters > times * PARAMETER_TOLERANCE


def difference(result: Result, reference: Result) -> Difference:
    """Between all survivors of ``result`` and the same seats of ``reference``; of a stage's replicas the worst
    counts.
    """
    pairs = list(zip(result.losses, reference.losses, strict=True))
    by_stage: dict[int, tuple[float, float]] = {}
    for rank in result.records:
        mine, theirs = result.parameters(rank), reference.parameters(reference.rank_of(result.seat_of(rank)))
        assert mine.keys() == theirs.keys()
        delta = sum((mine[name].double() - theirs[name].double()).pow(2).sum().item() for name in theirs)
        norm = sum(theirs[name].double().pow(2).sum().item() for name in theirs)
        stage = result.stage_of(rank)
        by_stage[stage] = max(by_stage.get(stage, (0.0, norm)), (apart(delta, 0.0), norm))
    deltas, norms = zip(*by_stage.values())
    return Difference(max(apart(a, b) for a, b in pairs), (sum(deltas) / sum(norms)) ** 0.5)


def apart(one: float, other: float) -> float:
    """How far; infinitely if one is NaN, which would hide behind a maximum."""
    return inf if isnan(one - other) else abs(one - other)


def assert_same_training(
    result: Result, reference: Result, lost: set[str] = NOBODY, left: set[str] = NOBODY
) -> Difference:
    """``result`` has lost exactly the seats ``lost`` (``left`` went as planned), and it trained what ``reference``
    did.  Who has come back by the end counts like the others.
    """
    assert result.code == 0, result.output[-6000:]
    assert {event["seat"] for event in result.of("lost")} == lost, result.output[-6000:]
    at_the_end = {result.seat_of(rank) for rank in result.records}
    never_away = {result.seat_of(rank) for rank in result.pids} - lost - left
    assert never_away <= at_the_end <= never_away | {event["seat"] for event in result.of("caught_up")}
    assert not result.restarted
    found = difference(result, reference)
    print(
        f"lost {', '.join(sorted(lost)) or 'nobody'}: losses differ by {found.loss:.2g}, parameters by "
        f"{found.parameters:.2g}"
    )
    assert found.tolerated, found
    return found


@contextmanager
def early_folder(result: Result) -> Iterator[Path]:
    """The run folder that a job without a start has named in its last line; it goes at the end."""
    folder = ROOT / result.output.partition("Run folder: ")[2].split()[0]
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def assert_one_line(result: Result, text: str) -> None:
    """The job has failed, one line says why, and there is no traceback."""
    lines = [line for line in result.output.splitlines() if text in line]
    assert result.code != 0 and len(lines) == 1, result.output[-6000:]
    assert "Traceback" not in result.output, result.output[-6000:]


@dataclass(frozen=True)
class Vehicle:
    """What a test's jobs are made of: ``script``, ``wrapped`` where something is changed from outside, and the
    ``overrides`` that make it a shape's.

    ``server``: the fixture of the fork server that has imported what it needs; ``others``: its scripts in place of
    others.
    """

    name: str
    script: str
    wrapped: str
    overrides: Callable[[Shape], list[str]]
    server: str = "server"
    others: Mapping[str, str] = field(default_factory=dict, compare=False)

    def arguments(self, shape: Shape, folder: Path, *more: str) -> list[str]:
        return [*self.overrides(shape), f"run_dir={folder}", *more]

    def __str__(self) -> str:
        return self.name


def plain_overrides(shape: Shape) -> list[str]:
    """Of tests/jobs/plain.py: a step takes about 10 ms."""
    topology = [f"topology.{name}={getattr(shape, name)}" for name in ("replicas", "stages", "micro_batches")]
    return [
        *topology,
        f"model.layers={shape.layers}",
        f"steps={STEPS}",
        "recycle.report=false",
        "recycle.rebalance=false",
    ]


DEEPSPEED = Vehicle("deepspeed", TRAIN, WRAPPED, lambda shape: shape.overrides())
PLAIN = Vehicle(
    "plain",
    "tests/jobs/plain.py",
    "tests/jobs/plain.py",
    plain_overrides,
    "plain_server",
    {CHECKPOINT: "tests/jobs/plain.py", COUNT: "tests/jobs/plain_count.py"},
)
STANDIN = replace(PLAIN, name="stand-in", overrides=lambda shape: [*plain_overrides(shape), "device=standin"])

OFF = tuple(
    f"recycle.{switch}" for switch in ("split_backward=false", "stagger_optimizer=false", "reroute=false", "rng=stream")
)


def assert_bitwise(result: Result, stock: Result) -> None:
    assert result.code == stock.code == 0, result.output[-6000:] + stock.output[-6000:]
    assert result.records.keys() == stock.records.keys()
    # the mean's last bit: we sum in double, stock in fp32
    assert result.losses == pytest.approx(stock.losses, rel=3e-7)
    for rank in stock.records:
        mine, theirs = result.parameters(rank), stock.parameters(rank)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs), (
            f"rank {rank}"
        )


LATE = {"RECYCLE_TEST_STANDIN_LATE": "7"}  # a seed


def assert_in_order(result) -> None:
    """Nothing that the stand-in has found was lost, since nothing could be raised where it was found."""
    assert "never raised" not in result.output, result.output[-6000:]


def on_deepspeed(*wraps: dict) -> dict[str, str]:
    """The environment of DeepSpeed's job on the stand-in, changed by ``wraps``."""
    return {
        "RECYCLE_TEST_WRAP": json.dumps([{"name": "on_the_standin"}, *wraps]),
        "RECYCLE_TEST_STANDIN_DEVICES": str(SQUARE.ranks),
    }


def strike_at(moment: str, rank: int, flag: str = "") -> dict:
    return {
        "script": WRAPPED,
        "RECYCLE_TEST_WRAP": json.dumps({"name": "strike_at", "moment": moment, "rank": rank, "flag": flag}),
    }


SAMPLES = 4  # of a step


def curve(folder: Path, name: str) -> dict[int, float]:
    """By step, from a file of DeepSpeed's CSV monitor: one heading, then each step at most once, in order."""
    (_, heading), *rows = csv.reader((folder / f"{name}.csv").open())
    steps = [int(samples) // SAMPLES for samples, _ in rows]
    assert heading == name.rpartition("_")[2] or name.endswith(heading)
    assert steps == sorted(set(steps)), f"{name}: {steps}"
    return dict(zip(steps, (float(value) for _, value in rows)))


LOG = ("++recycle.log={}", "++recycle.checkpoint.overhead=0.02", "recycle.rejoin=always")
ALONE = Shape(1, 3, 4)
BOTH = pytest.mark.parametrize("vehicle", (PLAIN, DEEPSPEED), ids=lambda vehicle: vehicle.name, indirect=True)
