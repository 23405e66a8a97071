"""A small GPT-2 in a loop with Accelerate, with sharded replicas or stock DeepSpeed.

RECYCLE_TEST_HUGGING_FACE holds as JSON what tests/jobs/hugging_face.py names, of which this job knows ``folder``,
``replicas``, ``stage``, ``samples``, ``evaluated``, ``recycle``, ``resume`` and ``kills``: in a "step", or while
"evaluating".
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import endings
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from hugging_face_model import FIRST_EVALUATED, Samples, model
from torch.utils.data import DataLoader

job = json.loads(os.environ["RECYCLE_TEST_HUGGING_FACE"])
FOLDER, RANK = Path(job["folder"]), int(os.environ["RANK"])
ACCUMULATION, BATCH, EPOCHS = 2, 2, 2


def die(where: str, number: int) -> None:
    if [RANK, where, number] in job["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)


def config() -> dict[str, Any]:
    recycle = {"enabled": False}
    if job["replicas"]:
        recycle = {"enabled": True, "unit": "replica", "replicas": job["replicas"], "run_dir": job["folder"]}
        recycle |= {"report": False, "check_replicas": 1} | job["recycle"]
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": job["stage"]},
        "recycle": recycle,
    }


def main() -> None:
    PartialState(cpu=True)  # else Accelerate counts one process on a machine without accelerators
    plugin = DeepSpeedPlugin(hf_ds_config=config())
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    gpt = model()
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
    torch.manual_seed(5)
    loaders = (
        DataLoader(Samples(job["samples"]), BATCH, shuffle=True),
        DataLoader(Samples(job["evaluated"], first=FIRST_EVALUATED), 3),
    )
    gpt, optimizer, scheduler, train, evaluate = accelerator.prepare(gpt, optimizer, scheduler, *loaders)
    if job["resume"]:
        accelerator.load_state(job["resume"])
    record: dict[str, Any] = {"evaluated": [], "losses": [], "trained": [], "rates": [], "mains": []}
    steps, batches = 0, 0
    for epoch in range(EPOCHS):
        gpt.train()
        for batch in train:
            die("step", steps + 1)
            with accelerator.accumulate(gpt):
                loss = gpt(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record["trained"].append(batch["input_ids"][:, 0].tolist())
            if accelerator.sync_gradients:
                steps += 1
                record["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
                record["rates"].append(scheduler.get_last_lr()[0])
        gpt.eval()
        numbers = []
        for batch in evaluate:
            batches += 1
            die("evaluating", batches)
            with torch.no_grad():
                logits = gpt(**batch).logits
            words, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            assert words.shape == labels.shape
            numbers += labels[:, 0].tolist()
        record["evaluated"].append(sorted(numbers))
        record["mains"].append(accelerator.is_main_process)
        accelerator.save_state(str(FOLDER / "out" / f"epoch{epoch}"))
    accelerator.wait_for_everyone()
    weights = {}
    zero = sys.modules["deepspeed"].zero  # which Hugging Face's packages have imported, and not this script
    for name, parameter in gpt.module.named_parameters():
        with zero.GatheredParameters([parameter], enabled=job["stage"] == 3):
            weights[name] = parameter.detach().float().flatten().tolist()
    endings.leave(FOLDER, record | {"weights": weights, "steps": steps})


if __name__ == "__main__":
    main()
