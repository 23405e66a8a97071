"""Weights & Biases shows one run per job, whichever process writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_run(job_id: str) -> Iterator[None]:
    """A context in which ``wandb.init()`` starts or resumes the job's run, unless the environment names a run."""
    given = {"WANDB_RUN_ID": job_id, "WANDB_RESUME": "allow"}
    added = [name for name in given if name not in os.environ]
    os.environ |= {name: given[name] for name in added}
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
