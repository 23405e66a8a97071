"""The job of the trials: a small pipeline in plain torch with dropout and Adam, on whatever device a worker has.

The plugin's launcher runs this file on each worker. A worker that reaches the end writes RUN_DIR/losses/rank<r>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from recycle_plugin.adapters.plain import Pipeline

WORDS, TOKENS, WIDTH = 64, 32, 32
GO, HELD_S = "go", 200.0  # the file in the run folder that ends --hold
SETTLED = 2  # steps in which everything is made that is made only once


class SmallLayer(nn.Module):
    """A residual layer of the given ``width``."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def batch(step: int, replica: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words (1, 32) and the words that follow them; mostly each word determines the next."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * replica + micro_batch)
    noise = torch.randint(0, 3, (1, TOKENS + 1), generator=generator)
    ids = (torch.arange(TOKENS + 1) * (1 + replica) + noise) % WORDS
    return ids[:, :-1], ids[:, 1:]


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def main(watch: Callable[[], AbstractContextManager[Mapping[str, Any]]] = lambda: nullcontext({})) -> None:
    """Train, and write this rank's record with what ``watch`` has seen since everything that is made once was made."""
    found = parser().parse_args()
    layers = [
        lambda: nn.Embedding(WORDS, WIDTH),
        *[lambda: SmallLayer(WIDTH, found.dropout)] * 2,
        lambda: nn.Linear(WIDTH, WORDS),
    ]
    settings = json.loads(found.settings) | {"run_dir": str(found.run_dir), "report": False, "faults": found.fault}
    pipeline = Pipeline(
        layers,
        loss,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch,
        stages=2,
        micro_batches=2,
        settings=settings,
        device=found.device,
    )
    hold = Hold(found.hold, found.run_dir / GO)
    record: dict[str, Any] = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "losses": []}
    if found.measure:
        from recycle_plugin.lab.checks import measured

        measured.write(pipeline, found.measure)
    while pipeline.steps < min(SETTLED, found.steps):
        record["losses"].append(pipeline.step())
    with watch() as seen:
        train(pipeline, found.steps, record, hold)
    record |= seen
    path = found.run_dir / "losses" / f"rank{record['rank']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


class Hold(NamedTuple):
    """All workers wait for ``file`` before ``step``, counted from 0; None: never."""

    step: int | None
    file: Path

    def wait(self, steps: int) -> None:
        """Return once step number ``steps`` may begin. Raises TimeoutError."""
        until = time.monotonic() + HELD_S
        while steps == self.step and not self.file.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {HELD_S:g} s for {self.file}")
            time.sleep(0.01)


def train(pipeline: Pipeline, steps: int, record: dict, hold: Hold) -> None:
    """Train until ``steps`` steps are done in all, and wait until they are committed."""
    while pipeline.steps < steps:
        hold.wait(pipeline.steps)
        record["losses"].append(pipeline.step())
    pipeline.settle()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--local_rank", type=int)  # DeepSpeed's launcher passes it
    made.add_argument("--deepspeed_config")  # the plugin's launcher reads the placement from it
    made.add_argument("--run-dir", type=Path, required=True)
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--device", help="its kind (default: an accelerator, or else the host)")
    made.add_argument(
        "--hold", type=int, metavar="STEP", help="begin it only once there is a file go in the run folder"
    )
    made.add_argument("--dropout", type=float, default=0.1)
    made.add_argument("--fault", action="append", default=[])
    made.add_argument("--settings", default="{}", help="the plugin's, as JSON")
    made.add_argument("--measure", type=Path, help="measure hosts and links before the first step, and write that here")
    return made


if __name__ == "__main__":
    main()
