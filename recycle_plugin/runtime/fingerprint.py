"""A hash of one tensor, to be compared with those of its other copies (core/replicas.py), and what rounds alike.  A stage's whole state: runtime/state.py."""

from __future__ import annotations

import hashlib

import torch

from recycle_plugin.runtime.state import raw


def fingerprint(tensor: torch.Tensor) -> str:
    """SHA-256 over its type, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(raw(tensor))
    return found.hexdigest()


def arithmetic() -> str:
    """What decides how operations on the CPU round, besides their inputs: workers with the same text round alike."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
