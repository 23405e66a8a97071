"""The killed job of sharded replicas: a small net under DeepSpeed's ZeRO 3, on whatever device a rank has.

The plugin's launcher runs this file on each rank; two ranks hold a replica. All samples of a step are equal, so its
loss does not depend on who computes it. A rank that reaches the end writes RUN_DIR/losses/rank<r>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

from recycle_plugin.lab.checks.small_job import GO, Hold

WIDTH = 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},  # DeepSpeed's own needs a compiler
    "steps_per_print": 10_000,
}


def sample(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels (4, 8) of all micro-batches of a step."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x.roll(1, 1))


def main() -> None:
    """Train, and write this rank's record."""
    found = parser().parse_args()
    recycle = {"enabled": True, "unit": "replica", "replicas": 2, "run_dir": str(found.run_dir), "report": False}
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, WIDTH))
    config = CONFIG | {"recycle": recycle | {"check_replicas": 1, "faults": found.fault}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    hold, losses = Hold(found.hold, found.run_dir / GO), {}
    while engine.global_steps < found.steps:
        step = engine.global_steps
        hold.wait(step)
        inputs, labels = (each.to(engine.device) for each in sample(step))
        loss = nn.functional.mse_loss(engine(inputs), labels)
        engine.backward(loss)
        losses[step] = loss.item()
        engine.step()
    path = found.run_dir / "losses" / f"rank{os.environ['RANK']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), "losses": losses}))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the script's own arguments."""
    made = argparse.ArgumentParser()
    made.add_argument("--run-dir", type=Path, required=True)
    made.add_argument("--steps", type=int, default=8)
    made.add_argument(
        "--hold", type=int, metavar="STEP", help="begin it only once there is a file go in the run folder"
    )
    made.add_argument("--fault", action="append", default=[])
    return made


if __name__ == "__main__":
    sys.exit(main())
