"""Where Megatron-LM is, and the jobs that are run with it.

scripts/environment.sh puts a release with ``megatron.training`` into .venv/megatron_lm, beside the one that the lab's
layers are from; RECYCLE_MEGATRON names another folder.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/jobs/megatron_lm.py"
MISSING = "Megatron-LM was not tried: there is no megatron.training in .venv/megatron_lm, nor in $RECYCLE_MEGATRON"
ON_CPU = [
    "--distributed-backend", "gloo",
    "--transformer-impl", "local",
    "--use-cpu-initialization",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-dropout-fusion",
    "--no-bias-gelu-fusion",
    "--no-rope-fusion",
    "--disable-jit-fuser",
]  # fmt: skip
SMALL = [
    "--num-layers", "4",
    "--hidden-size", "32",
    "--num-attention-heads", "2",
    "--seq-length", "16",
    "--max-position-embeddings", "16",
    "--mock-data",
    "--tokenizer-type", "NullTokenizer",
    "--vocab-size", "63",
    "--make-vocab-size-divisible-by", "16",
    "--num-workers", "0",
    "--micro-batch-size", "1",
    "--train-iters", "6",
    "--lr", "1e-3",
    "--lr-decay-style", "constant",
    "--log-interval", "1",
    "--eval-iters", "0",
    "--eval-interval", "1000",
    "--attention-dropout", "0",
    "--hidden-dropout", "0",
    *ON_CPU,
]  # fmt: skip


def home() -> Path | None:
    """The folder that has Megatron-LM with its training loop; None where there is none."""
    found = Path(os.environ.get("RECYCLE_MEGATRON", ROOT / ".venv" / "megatron_lm"))
    return found if (found / "megatron" / "training" / "training.py").is_file() else None


def flags(stages: int, replicas: int, micro_batches: int, *more: str) -> list[str]:
    """The command line of a small GPT."""
    size = "--global-batch-size", str(replicas * micro_batches)
    return [*SMALL, *size, "--pipeline-model-parallel-size", str(stages), *more]


def on_python_3_11() -> None:
    """Let Megatron-LM's releases for Python 3.12 and newer be imported by 3.11, where ``typing`` lacks one name."""
    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]
