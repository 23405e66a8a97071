"""A script's batch as the transport carries it, without pickle: a tuple of tensors, the first describes the others."""

from __future__ import annotations

import json
from typing import Any

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.devices.port import Tensors


def packed(batch: Any, label: Any = None) -> Tensors:
    """Pack a batch of tensors, tuples, lists and None, with ``label``, a JSON value; tensors are copied to host memory.
    Raises RecycleError for anything else in a batch.
    """
    tensors: list[torch.Tensor] = []
    description = json.dumps([label, _describe(batch, tensors)]).encode()
    return (torch.frombuffer(bytearray(description), dtype=torch.uint8), *tensors)


def described(tensors: Tensors) -> Any:
    """Return the label that :func:`packed` was given."""
    return json.loads(bytes(tensors[0].numpy()))[0]


def unpacked(tensors: Tensors) -> Any:
    """Return the batch that was packed, in the same memory: a forward copies what a layer may change. Lists have become
    tuples.
    """

    def value(description: Any) -> Any:
        if isinstance(description, list):
            return tuple(map(value, description))
        return None if description is None else tensors[1 + description]

    return value(json.loads(bytes(tensors[0].numpy()))[1])


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` as JSON with numbers in place of tensors; the tensors' copies go to ``tensors``."""
    if torch.is_tensor(value):
        tensors.append(fetch(value, "a batch", shared=False))
        return len(tensors) - 1
    if isinstance(value, (tuple, list)):
        return [_describe(item, tensors) for item in value]
    if value is None:
        return None
    raise RecycleError(
        f"a batch has a {type(value).__name__} in it; the pipeline engine takes tensors, and tuples or lists of tensors"
    )
