"""A hash of a worker's state, to be compared with those of the stage's other replicas (core/replicas.py), and what rounds alike."""

from __future__ import annotations

import hashlib
from typing import Iterable

import torch


def fingerprint(parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None = None) -> str:
    """SHA-256 over the bytes of all parameters, and of the optimizer's state of each.

    Reads everything once: a CPU core hashes about 1 GB/s (0.8 measured), and a parameter with Adam has 12 bytes in fp32; tensors of an
    accelerator are copied to the host one by one.
    """
    found = hashlib.sha256()
    for parameter in parameters:
        _add(found, parameter.detach())
        for name, value in sorted(optimizer.state.get(parameter, {}).items()) if optimizer is not None else ():
            found.update(name.encode())
            _add(found, value) if torch.is_tensor(value) else found.update(repr(value).encode())
    return found.hexdigest()


def arithmetic() -> str:
    """What decides how operations on the CPU round, besides their inputs: workers with the same text round alike."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _add(found: "hashlib._Hash", tensor: torch.Tensor) -> None:
    found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.numel():
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
