"""A training job of ours as flags of Megatron-LM's own pretrain_gpt.py, the papers' stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recycle_plugin.lab.training.compose import GPTModel, IndexedFiles, TrainingJob, compose

FILLED = 128  # the vocabulary is filled up to a multiple of it, by default


def write(job: TrainingJob, folder: Path) -> str:
    """Write the job's settings to ``folder``/recycle.json; return the shell command that trains it.

    Raises SystemExit for a setting without a flag of Megatron-LM.
    """
    words = " ".join(flags(job))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recycle.json"
    path.write_text(json.dumps(settings(job), indent=1))
    return (
        f"python -m recycle_plugin.launch --workers {job.workers} pretrain_gpt.py {words} --recycle-config {path}\n"
        "(on more than one host: what your launcher starts, in the place of --workers)"
    )


def settings(job: TrainingJob) -> dict[str, Any]:
    """Return the job's section, without defaults."""
    usual = compose().recycle
    return {key: value for key, value in job.recycle.items() if value != usual[key]}


def flags(job: TrainingJob) -> list[str]:
    """Return Megatron-LM's command line for the job; without indexed data it reads Megatron-LM's mock data."""
    return [str(word) for words in _flags(job) for word in words]


def _flags(job: TrainingJob) -> Iterator[tuple[object, ...]]:
    model, shape, optimizer = job.model, job.topology, job.optimizer
    if not isinstance(model, GPTModel):
        raise SystemExit("run_gpt: model.kind is emulated, and Megatron-LM trains GPTs: choose an experiment with one")
    if optimizer.type not in ("Adam", "AdamW"):
        raise SystemExit(f"run_gpt: optimizer.type is {optimizer.type}: Megatron-LM gets Adam or AdamW")
    given = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | optimizer.params
    yield "--num-layers", model.layers, "--hidden-size", model.hidden, "--num-attention-heads", model.heads
    yield "--seq-length", model.sequence, "--max-position-embeddings", model.sequence
    yield "--attention-dropout", model.dropout, "--hidden-dropout", model.dropout
    yield () if model.tied else ("--untie-embeddings-and-output-weights",)
    yield "--pipeline-model-parallel-size", shape.stages
    yield "--micro-batch-size", job.micro_batch_size
    yield "--global-batch-size", job.micro_batch_size * shape.micro_batches * shape.replicas
    yield "--train-iters", job.steps, "--seed", job.seed, "--log-interval", max(job.report_every, 1)
    yield "--lr", given["lr"], "--lr-decay-style", "constant", "--weight-decay", given["weight_decay"]
    yield "--adam-beta1", given["betas"][0], "--adam-beta2", given["betas"][1], "--adam-eps", given["eps"]
    yield "--clip-grad", job.gradient_clipping
    yield () if job.precision == "fp32" else (f"--{job.precision}",)
    yield (
        "--eval-iters",
        0,
        "--eval-interval",
        job.steps,
        "--transformer-impl",
        "local",
        "--no-gradient-accumulation-fusion",
    )
    yield "--tokenizer-type", "NullTokenizer", "--vocab-size", model.vocabulary - 1
    yield () if model.vocabulary % FILLED == 0 else ("--make-vocab-size-divisible-by", 1)
    indexed = isinstance(job.data, IndexedFiles) and job.data.path
    yield ("--data-path", job.data.path) if indexed else ("--mock-data",)
