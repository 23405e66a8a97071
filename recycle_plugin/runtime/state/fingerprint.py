"""A hash of one tensor, to compare its copies (core/coordinator/facts/replica_check.py).

For a stage's whole state see runtime/state/stage_state.py.
"""

from __future__ import annotations

import hashlib

import torch

from recycle_plugin.runtime.state.stage_state import raw


def fingerprint(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes, in hex."""
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(raw(tensor))
    return found.hexdigest()
