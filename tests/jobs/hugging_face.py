"""A small GPT-2 under Hugging Face's Trainer, with sharded replicas or stock DeepSpeed.

RECYCLE_TEST_HUGGING_FACE holds as JSON: ``folder``: of the job; ``replicas``: 0 for stock DeepSpeed; ``stage``: of
ZeRO; ``samples``, ``evaluated``: how many there are of each; ``uneven``: whether samples have labels on some of their
tokens only; ``dropout``: of the model; ``iterable``: whether those to train come as a stream; ``arguments``: more of
TrainingArguments'; ``metrics``: whether predictions are gathered;
``kills``: [rank, where, number] of each process that kills itself, with the number of the process behind them if the
rank's first one is not meant: in the "step" of that number, in its forward, 0 being the process's first one; as it is
"beginning" to train, 0; "giving" its state to others, 0; in the "log" behind a step, before others have its loss;
"evaluating", behind so many batches of all evaluations; or "writing", in the middle of the model's file of the
checkpoint of that step; ``held``: the steps before which ranks wait for a file
``goSTEP`` in the folder; ``resume``: a checkpoint that is gone on from, "last" for the last one there is, "deleted"
in a process that has come back for one that is deleted as soon as the script has found it, or null;
``patience``: of EarlyStoppingCallback, or 0, and its ``threshold``; ``own``: whether the script has its own
way to get batches; ``recycle``: more settings.
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
from hugging_face_model import FIRST_EVALUATED, Samples, model
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

job = json.loads(os.environ["RECYCLE_TEST_HUGGING_FACE"])
FOLDER, RANK = Path(job["folder"]), int(os.environ["RANK"])
INCARNATION = int(os.environ.get("RECYCLE_INCARNATION", "0"))


def die(where: str, number: int) -> None:
    if [RANK, where, number] + [INCARNATION] * bool(INCARNATION) in job["kills"]:
        os.kill(os.getpid(), signal.SIGKILL)


class Stream(torch.utils.data.IterableDataset):
    """The same samples, one after the other."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self):
        return (self.samples[place] for place in range(len(self.samples)))


class Watched:
    """The model of a job, as far as it was trained; it dies where its process is to."""

    def __init__(self, gpt: GPT2LMHeadModel) -> None:
        self.steps, self._save = 0, gpt.save_pretrained
        gpt.register_forward_pre_hook(self._before, with_kwargs=True)
        gpt.save_pretrained = self._write

    def _before(self, gpt: GPT2LMHeadModel, _: object, batch: dict[str, torch.Tensor]) -> None:
        if gpt.training:
            trained.setdefault(self.steps + 1, []).extend(batch["input_ids"][:, 0].tolist())
            die("step", self.steps + 1)
            if len(trained) == 1:
                die("step", 0)

    def _write(self, folder: str, *arguments: Any, **named: Any) -> None:
        self._save(folder, *arguments, **named)
        written.append(folder)
        if [RANK, "writing", self.steps] in job["kills"] and not INCARNATION:
            os.truncate(Path(folder) / "model.safetensors", 1000)
            die("writing", self.steps)


class Watching(TrainerCallback, ExportableState):
    def __init__(self, watched: Watched) -> None:
        self.watched, self.batches = watched, 0

    def state(self) -> dict[str, Any]:
        if self.watched.steps:
            die("giving", 0)
        return {"args": {}, "attributes": {}}

    def on_train_begin(self, args, state, control, **more):
        die("beginning", 0)

    def on_step_begin(self, args, state, control, **more):
        self.watched.steps = state.global_step

    def on_step_end(self, args, state, control, **more):
        self.watched.steps = state.global_step
        if state.global_step + 1 in job["held"]:
            endings.wait_for(FOLDER / f"go{state.global_step + 1}")
        if control.should_log:
            die("log", state.global_step)

    def on_prediction_step(self, args, state, control, **more):
        self.batches += 1
        die("evaluating", self.batches)


class OwnBatches(Trainer):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return [next(epoch_iterator) for _ in range(num_batches)], None


def seen(found) -> dict[str, float]:
    """The metrics: which samples there were, and how many words were right."""
    words, labels = found.predictions.argmax(-1)[:, :-1], found.label_ids
    evaluated.append(sorted(labels[:, 0].tolist()))
    counted = labels[:, 1:] != -100
    return {"accuracy": float((words == labels[:, 1:])[counted].mean())}


evaluated: list[list[int]] = []
trained: dict[int, list[int]] = {}  # the numbers of the samples, by step
written: list[str] = []


def config() -> dict[str, Any]:
    recycle = {"enabled": False}
    if job["replicas"]:
        recycle = {"enabled": True, "unit": "replica", "replicas": job["replicas"], "run_dir": job["folder"]}
        recycle |= {"report": False, "check_replicas": 1} | job["recycle"]
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job["stage"], "stage3_gather_16bit_weights_on_model_save": True},
        "recycle": recycle,
    }


def main() -> None:
    gpt = model(job["dropout"])
    arguments = {
        "output_dir": str(FOLDER / "out"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "max_steps": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "seed": 7,
    } | job["arguments"]
    evaluated_on = Samples(job["evaluated"], first=FIRST_EVALUATED, uneven=job["uneven"])
    trained_on = Samples(job["samples"], uneven=job["uneven"])
    trainer = (OwnBatches if job["own"] else Trainer)(
        model=gpt,
        args=TrainingArguments(deepspeed=config(), **arguments),
        train_dataset=Stream(trained_on) if job["iterable"] else trained_on,
        eval_dataset=evaluated_on,
        compute_metrics=seen if job["metrics"] else None,
        callbacks=[
            Watching(Watched(gpt)),
            *([EarlyStoppingCallback(job["patience"], job["threshold"])] if job["patience"] else []),
        ],
    )
    resume, saved = job["resume"], arguments["output_dir"]
    if resume == "last":
        resume = get_last_checkpoint(saved) if Path(saved).exists() else None
    elif resume == "deleted":
        resume = str(Path(saved) / "checkpoint-2") if INCARNATION else None
    trainer.train(resume_from_checkpoint=resume)
    record: dict[str, Any] = {"history": trainer.state.log_history, "steps": trainer.state.global_step}
    record["after"] = trainer.evaluate()
    found = trainer.predict(evaluated_on)
    record["predicted"] = found.label_ids[:, 0].tolist()
    trainer.save_model(str(FOLDER / "model"))
    engine = trainer.model_wrapped
    weights = {}
    zero = sys.modules["deepspeed"].zero  # which Hugging Face's packages have imported, and not this script
    for name, parameter in engine.module.named_parameters():
        with zero.GatheredParameters([parameter], enabled=job["stage"] == 3):
            weights[name] = parameter.detach().float().flatten().tolist()
    record |= {"incarnation": INCARNATION, "trained": trained, "total_loss": trainer._total_loss_scalar}
    record |= {"evaluated": evaluated, "written": written, "weights": weights, "losses": []}
    record |= {"first": trainer.is_world_process_zero(), "best": trainer.state.best_model_checkpoint}
    endings.leave(FOLDER, record)


if __name__ == "__main__":
    main()
