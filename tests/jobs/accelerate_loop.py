"""A small GPT-2 in a loop with Accelerate, with sharded replicas or stock DeepSpeed.

RECYCLE_TEST_HUGGING_FACE holds as JSON what tests/jobs/hugging_face.py names, of which this job knows ``folder``,
``replicas``, ``stage``, ``samples``, ``evaluated``, ``recycle``, ``resume``, ``held`` and ``kills``: in a "step", or
while "evaluating"; and ``epochs``; ``longer``: whether samples are padded to lengths of their own; ``tracked``: whether
it logs by TensorBoard; ``odd``: what else the loop does: "reads" parameters, "sums" by torch.distributed itself, saves
by "dcp" or "dcp optimizer", gathers "more" in a process that has come back, "writes" on one process by :func:`writers`,
"opens" or "saves" a file on process 0 without them, or is "bare": it clips and reduces nothing, and only gathers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import endings
import torch
import torch.distributed.checkpoint
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from hugging_face_model import FIRST_EVALUATED, Samples, model
from torch.utils.data import DataLoader

job = json.loads(os.environ["RECYCLE_TEST_HUGGING_FACE"])
FOLDER, RANK = Path(job["folder"]), int(os.environ["RANK"])
INCARNATION = int(os.environ.get("RECYCLE_INCARNATION", "0"))
ACCUMULATION, BATCH = 2, 2


def die(where: str, number: int) -> None:
    if [RANK, where, number] + [INCARNATION] * bool(INCARNATION) in job["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch without the columns that its longest sample does not have."""
    length = 8 + int(samples[0]["input_ids"][0]) % 4 if job["longer"] else None
    return {name: torch.stack([one[name][:length] for one in samples]) for name in samples[0]}


def writers(accelerator: Accelerator) -> list[Callable[[int], object]]:
    """The ways by which scripts ask Accelerate for one process that writes: each appends a step's number to a file of
    its name.
    """

    def writer(name: str) -> Callable[[int], object]:
        def write(step: int) -> None:
            with open(FOLDER / "written" / name, "a") as file:
                file.write(f"{step}\n")

        return write

    (FOLDER / "written").mkdir(parents=True, exist_ok=True)
    state = PartialState()
    return [
        accelerator.on_main_process(writer("on_main_process")),
        accelerator.on_process(writer("on_process"), process_index=0),
        accelerator.on_local_process(writer("on_local_process"), local_process_index=0),
        accelerator.on_last_process(writer("on_last_process")),
        state.on_main_process(writer("state.on_main_process")),
        state.on_local_main_process(writer("state.on_local_main_process")),
        state.on_process(writer("state.on_process"), process_index=0),
        state.on_last_process(writer("state.on_last_process")),
        lambda step: accelerator.is_last_process and writer("is_last_process")(step),
        lambda step: state.is_last_process and writer("state.is_last_process")(step),
    ]


def odd(gpt: Any, accelerator: Accelerator, step: int) -> None:
    if job["odd"] == "reads":
        next(gpt.parameters()).sum()
    if job["odd"] == "sums":
        torch.distributed.all_reduce(torch.ones(1))
    if job["odd"].startswith("dcp") and step == 1:
        state: dict[str, Any] = {"model": gpt.module.state_dict()}
        if job["odd"] == "dcp optimizer":
            state["optimizer"] = gpt.optimizer.state_dict()
        torch.distributed.checkpoint.save(state, checkpoint_id=str(FOLDER / "dcp"))
    if job["odd"] == "more" and INCARNATION and step == 1:
        accelerator.gather(torch.ones(1))
    if job["odd"] == "opens" and accelerator.process_index == 0:
        (FOLDER / "steps").write_text(f"{step}")
    if job["odd"] == "saves" and RANK == 0:
        torch.save(step, FOLDER / "step.pt")


def config() -> dict[str, Any]:
    recycle = {"enabled": False}
    if job["replicas"]:
        recycle = {"enabled": True, "unit": "replica", "replicas": job["replicas"], "run_dir": job["folder"]}
        recycle |= {"report": False, "check_replicas": 1} | job["recycle"]
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": job["stage"],
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0 if job["odd"] == "dcp" else 100_000,
        },
        "recycle": recycle,
    }


class Loop:
    """A loop as in Accelerate's examples; ``record``: what comes out of it in this process."""

    def __init__(self) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config=config())
        self.accelerator = Accelerator(
            deepspeed_plugin=plugin,
            gradient_accumulation_steps=ACCUMULATION,
            log_with="tensorboard" if job["tracked"] else None,
            project_dir=str(FOLDER / "out"),
        )
        self.writers = writers(self.accelerator) if job["odd"] == "writes" else []
        gpt = model()
        optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        torch.manual_seed(5)
        loaders = (
            DataLoader(Samples(job["samples"]), BATCH, shuffle=True, collate_fn=padded),
            DataLoader(Samples(job["evaluated"], first=FIRST_EVALUATED), 3),
        )
        prepared = self.accelerator.prepare(gpt, optimizer, scheduler, *loaders)
        self.gpt, self.optimizer, self.scheduler, self.train, self.evaluate = prepared
        if job["tracked"]:
            self.accelerator.init_trackers("tracked")
        self.steps = self.batches = 0
        names = ("evaluated", "losses", "trained", "rates", "mains", "norms", "epochs", "gathered", "counted", "right")
        self.record: dict[str, Any] = {name: [] for name in names}

    def run(self) -> None:
        if job["resume"]:
            self.accelerator.load_state(job["resume"])
        for epoch in range(job["epochs"]):
            self.train_epoch()
            self.evaluate_epoch()
            self.record["mains"].append(self.accelerator.is_main_process)
            self.accelerator.save_state(str(FOLDER / "out" / f"epoch{epoch}"))
        self.accelerator.wait_for_everyone()

    def train_epoch(self) -> None:
        accelerator, record, total, words = self.accelerator, self.record, 0.0, 0
        self.gpt.train()
        for batch in self.train:
            die("step", self.steps + 1)
            with accelerator.accumulate(self.gpt):
                loss = self.gpt(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients and job["odd"] != "bare":
                    record["norms"].append(accelerator.clip_grad_norm_(self.gpt.parameters(), 0.5))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            record["trained"].append(batch["input_ids"][:, 0].tolist())
            words += batch["input_ids"].numel()
            if accelerator.sync_gradients:
                self.end_step(loss)
        record["epochs"].append(float(total) / len(self.train))
        record["counted"].append(accelerator.gather(torch.tensor([words])).tolist())

    def end_step(self, loss: torch.Tensor) -> None:
        accelerator, record = self.accelerator, self.record
        self.steps += 1
        if job["odd"] != "bare":
            record["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
        record["gathered"].append(accelerator.gather(loss.detach()[None]).tolist())
        if job["odd"] == "bare":
            record["losses"].append(sum(record["gathered"][-1]) / len(record["gathered"][-1]))
        record["rates"].append(self.scheduler.get_last_lr()[0])
        accelerator.log({"loss": record["losses"][-1]}, step=self.steps)
        if accelerator.is_main_process and self.steps % 8 == 0:
            accelerator.print("step", self.steps)
        for write in self.writers:
            write(self.steps)
        odd(self.gpt, accelerator, self.steps)
        if self.steps + 1 in job["held"]:
            endings.wait_for(FOLDER / f"go{self.steps + 1}")

    def evaluate_epoch(self) -> None:
        self.gpt.eval()
        numbers: list[int] = []
        right = 0
        for batch in self.evaluate:
            self.batches += 1
            die("evaluating", self.batches)
            with torch.no_grad():
                logits = self.gpt(**batch).logits
            words, labels = self.accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            assert words.shape == labels.shape
            numbers += labels[:, 0].tolist()
            right += int((words == labels).sum())
        self.record["right"].append(right)
        self.record["evaluated"].append(sorted(numbers))

    def weights(self) -> dict[str, list[float]]:
        found = {}
        zero = sys.modules["deepspeed"].zero  # which Hugging Face's packages have imported, and not this script
        for name, parameter in self.gpt.module.named_parameters():
            with zero.GatheredParameters([parameter], enabled=job["stage"] == 3):
                found[name] = parameter.detach().float().flatten().tolist()
        return found


def main() -> None:
    PartialState(cpu=True)  # else Accelerate counts one process on a machine without accelerators
    loop = Loop()
    loop.run()
    loop.accelerator.save_model(loop.gpt, str(FOLDER / "model"))
    record = loop.record | {"weights": loop.weights(), "steps": loop.steps, "incarnation": INCARNATION}
    loop.accelerator.end_training()
    endings.leave(FOLDER, record)


if __name__ == "__main__":
    main()
