"""Losses of Hugging Face's Trainer and of a loop with Accelerate beside stock DeepSpeed: without a kill, with one whose
replica stays away, and with one whose replica comes back. With -rP it prints the table of docs/figures.md: the last
step's loss, the largest distance of a step's loss from stock's, and the loss after training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.jobs.hugging_face_model import FIRST_EVALUATED, Samples, model
from tests.support.cluster import ForkServer, Result
from tests.support.hugging_face import JOB, LOOP, SCRIPT, Start, history, starting

KILLED, HELD, STEPS = 3, 5, 32
KILL = {"kills": [[3, "step", KILLED]]}  # rank 3's replica is the second
COMES_BACK = {"held": [HELD], "recycle": {"rejoin": "always"}}
JOBS = {
    SCRIPT: {"samples": 53, "arguments": {"max_steps": STEPS, "learning_rate": 5e-3}, "metrics": False},
    LOOP: {"script": LOOP, "samples": 53, "epochs": 8},
}


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    with starting(server, tmp_path) as start:
        yield start


class Trained(NamedTuple):
    """Each step's loss as the script of process 0 knows it; ``after``: of the samples that jobs are evaluated on."""

    losses: list[float]
    after: float


def trained(result: Result) -> Trained:
    assert result.code == 0 and not result.of("error") and not result.of("warning"), result.output[-6000:]
    record, gpt = result.records[0], model()
    samples = torch.stack([sample["input_ids"] for sample in Samples(JOB["evaluated"], first=FIRST_EVALUATED)])
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(torch.tensor(record["weights"][name]).view_as(parameter))
        after = gpt(input_ids=samples, labels=samples).loss.item()
    return Trained(history(record) if "history" in record else record["losses"], after)


@pytest.mark.all_kills
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", JOBS)
def test_losses_beside_stock(start, script, stage):
    """A lost replica's samples are in no step, so that losses differ from stock's from the kill on."""
    job = JOBS[script] | {"stage": stage}
    found = {
        "stock": trained(start(replicas=0, **job)),
        "no kill": trained(start(**job)),
        "lost": trained(start(**job, **KILL)),
        "back": trained(start(**job, **KILL, **COMES_BACK)),
    }
    stock = found["stock"]
    for name, one in found.items():
        apart = [abs(mine - theirs) for mine, theirs in zip(one.losses, stock.losses, strict=True)]
        assert max(apart[: KILLED - 1]) < 1e-5, name
        print(f"{Path(script).stem}, ZeRO {stage}, {name}: {one.losses[-1]:.4f}, {max(apart):.1g}, {one.after:.4f}")
        assert one.after < one.losses[0] - 0.3, name
    calm = found["no kill"]
    assert calm.losses == pytest.approx(stock.losses, rel=1e-4) and calm.after == pytest.approx(stock.after, rel=1e-4)
