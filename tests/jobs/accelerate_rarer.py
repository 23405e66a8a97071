"""A loop with Accelerate that has what scripts use less often: it begins within an epoch (skip_first_batches), splits
batches, does not even them out, prepares a loader for each epoch, broadcasts, gathers objects, pads, and ends by a
trigger.

It knows of the job what tests/jobs/accelerate_loop.py does, but ``odd``, ``longer``, ``resume`` and ``tracked``.
"""

from __future__ import annotations

from typing import Any

import endings
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, PartialState
from accelerate.utils import broadcast, broadcast_object_list
from accelerate_loop import ACCUMULATION, BATCH, FOLDER, INCARNATION, RANK, config, die, job
from hugging_face_model import FIRST_EVALUATED, Samples, model
from torch.utils.data import DataLoader

RANKS, SKIPPED = 4, 2  # batches of the first epoch
PIECE = 3  # samples of an evaluation's batch for each rank
TRIGGERS = {4: 3, job["epochs"] * 3 - 2: 0}  # steps, and the rank that pulls then; the job ends with the last one


def train_loader() -> DataLoader:
    return DataLoader(Samples(job["samples"]), BATCH * RANKS, shuffle=True)


class Loop:
    """``record``: what comes out of it in this process."""

    def __init__(self) -> None:
        self.accelerator = accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config()),
            gradient_accumulation_steps=ACCUMULATION,
            dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
        )
        gpt = model()
        optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        torch.manual_seed(5)
        loaders = (
            train_loader(),
            DataLoader(Samples(job["evaluated"], first=FIRST_EVALUATED), PIECE * RANKS),
        )
        prepared = accelerator.prepare(gpt, optimizer, scheduler, *loaders)
        self.gpt, self.optimizer, self.scheduler, self.train, self.evaluate = prepared
        self.steps = 0
        names = ("losses", "gathered", "trained", "rates", "norms", "objects", "sent", "words", "padded", "stops")
        self.record: dict[str, Any] = {name: [] for name in (*names, "evaluated", "rest")}

    def run(self) -> None:
        for epoch in range(job["epochs"]):
            if epoch == 0:
                train = self.accelerator.skip_first_batches(self.train, SKIPPED)
            else:
                train = self.accelerator.prepare(train_loader())
            ends = self.train_epoch(train)
            self.record["rest"].append(self.numbers(self.accelerator.skip_first_batches(self.evaluate, 1)))
            self.record["evaluated"].append(self.numbers(self.evaluate))
            if ends:
                return

    def train_epoch(self, train: Any) -> bool:
        accelerator, record = self.accelerator, self.record
        self.gpt.train()
        for batch in train:
            die("step", self.steps + 1)
            with accelerator.accumulate(self.gpt):
                loss = self.gpt(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    record["norms"].append(accelerator.clip_grad_norm_(self.gpt.parameters(), 0.5))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            record["trained"].append(batch["input_ids"][:, 0].tolist())
            if accelerator.sync_gradients:
                self.end_step(loss)
                if record["stops"][-1] and self.steps == max(TRIGGERS):
                    return True
        return False

    def end_step(self, loss: torch.Tensor) -> None:
        accelerator, record = self.accelerator, self.record
        self.steps += 1
        record["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
        record["gathered"].append(accelerator.gather(loss.detach()[None]).tolist())
        record["rates"].append(self.scheduler.get_last_lr()[0])
        record["objects"].append(accelerator.gather_for_metrics([f"of {RANK}" + "." * 50 * (3 - RANK)], True))
        record["sent"].append(broadcast(torch.tensor([self.steps, RANK])).tolist())
        record["words"].append(broadcast_object_list([f"step {self.steps} of {RANK}", RANK]))
        padded = accelerator.pad_across_processes(torch.full((1, 1 + RANK), RANK), dim=1, pad_index=-1)
        record["padded"].append(accelerator.gather(padded).tolist())
        if TRIGGERS.get(self.steps) == RANK:
            accelerator.set_trigger()
        record["stops"].append(accelerator.check_trigger())
        if self.steps + 1 in job["held"]:
            endings.wait_for(FOLDER / f"go{self.steps + 1}")

    def numbers(self, loader: Any) -> list[int]:
        """Of the samples that all processes have of it, each with as many batches as there are for it."""
        self.gpt.eval()
        found: list[int] = []
        for batch in loader:
            with torch.no_grad():
                assert self.gpt(**batch).logits.shape[:2] == batch["labels"].shape
            found += batch["labels"][:, 0].tolist()
        return self.accelerator.gather_for_metrics(found, use_gather_object=True)


def main() -> None:
    PartialState(cpu=True)  # else Accelerate counts one process on a machine without accelerators
    loop = Loop()
    loop.run()
    weights = {name: each.detach().float().flatten().tolist() for name, each in loop.gpt.module.named_parameters()}
    endings.leave(FOLDER, loop.record | {"weights": weights, "steps": loop.steps, "incarnation": INCARNATION})


if __name__ == "__main__":
    main()
