"""Jobs of Megatron-LM in tests: with the plugin and without it, and what they leave."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support import megatron_lm
from tests.support.cluster import ForkServer, Result, Run

EVALUATES = "--eval-iters", "2", "--eval-interval", "2"


@dataclass(frozen=True)
class Flags:
    """A command line, and how many workers it is for."""

    ranks: int
    words: list[str]


def gpt(stages: int, replicas: int, *more: str, micro_batches: int = 4) -> Flags:
    return Flags(stages * replicas, megatron_lm.flags(stages, replicas, micro_batches, *more))


def ramped_up(stages: int, replicas: int, samples: int, *more: str) -> Flags:
    """The first two steps have 4 samples, of 16 tokens each, and later ones 8."""
    words = gpt(stages, replicas, "--step-batch-size-schedule", "0:4 128:8", "--train-samples", str(samples)).words
    for gone in ("--train-iters", "--global-batch-size"):
        del words[(where := words.index(gone)) : where + 2]
    return Flags(stages * replicas, [*words, *more])


@dataclass(frozen=True)
class Trained:
    """A finished job: its ``result``, and what each rank has left."""

    result: Result
    ranks: dict[int, dict]

    @property
    def losses(self) -> list[float]:
        return next(each["losses"] for each in self.ranks.values() if each["losses"])


OURS = {"launcher": "plain", "script": megatron_lm.SCRIPT}
STOCK = {"launcher": "tasks", "plugin": "runpy", "script": "tests.jobs.megatron_lm"}  # a process for each rank


class Jobs:
    """Jobs from the server ``warm`` in folders below ``folder``."""

    def __init__(self, warm: ForkServer, folder: Path, references: dict[tuple[str, ...], Trained]) -> None:
        self._warm, self._folder, self._references = warm, folder, references
        self.runs: list[Run] = []

    def stock(self, flags: Flags) -> Trained:
        """What Megatron-LM trains without the plugin; run once for all tests."""
        if (key := tuple(flags.words)) not in self._references:
            self._references[key] = self(flags)
        return self._references[key]

    def start(self, flags: Flags, recycle: dict | None = None, *wraps: dict) -> Run:
        """Start Megatron-LM; without a section it is stock, and the plugin no part of it."""
        folder = self._folder / f"job{len(self.runs)}"
        folder.mkdir()
        arguments = [str(folder / "out"), *flags.words]
        if recycle is not None:
            section = {"enabled": True, "report": False, "run_dir": str(folder), **recycle}
            (folder / "recycle.json").write_text(json.dumps({"recycle": section}))
            arguments += ["--recycle-config", str(folder / "recycle.json")]
        more = {"PYTHONPATH": str(megatron_lm.home()), "RECYCLE_TEST_WRAP": json.dumps(wraps)}
        how = STOCK if recycle is None else OURS
        run = Run(self._warm, folder, flags.ranks, arguments=arguments, **how, **more)
        self.runs.append(run)
        return run

    def __call__(self, flags: Flags, recycle: dict | None = None, *wraps: dict) -> Trained:
        return trained(self.start(flags, recycle, *wraps))


def trained(run: Run) -> Trained:
    result = run.ended_well()
    return Trained(result, {int(file.stem[4:]): torch.load(file) for file in (run.folder / "out").glob("rank*.pt")})


def assert_same_weights(one: Trained, other: Trained) -> set[int]:
    both = one.ranks.keys() & other.ranks.keys()
    assert both
    for rank in both:
        mine, theirs = one.ranks[rank]["weights"], other.ranks[rank]["weights"]
        assert mine.keys() == theirs.keys() and len(mine) > 5
        differ = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not differ, f"rank {rank}: {differ}"
    return both


def evaluations(of: Trained) -> dict[str, float]:
    """The losses that are printed, by their place, each once."""
    found = re.findall(r"validation loss at (.*?) \| lm loss value: (\S+)", of.result.output)
    assert len({place for place, _ in found}) == len(found)
    return {place: float(loss) for place, loss in found}
