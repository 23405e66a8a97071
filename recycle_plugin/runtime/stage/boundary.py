"""What passes between stages: tensors of any dtype, in shapes that may change with each micro-batch.

A stage's output is a tensor or a tuple of tensors, and travels as a tuple. For a tuple of one, a mark travels along,
since the next layer does not get a lone tensor. One gradient comes back for each floating-point or complex member; a
mark if nothing was computed from the member. (Zeros instead would run its producer backwards, and give NaN at an
infinite derivative.)
"""

from __future__ import annotations

from typing import Any

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.devices.port import COPY_S, Device, Tensors

MARK = torch.empty(0, 0, dtype=torch.bool)


def batch_part(value: Any, device: Device, shared: bool = False) -> Any:
    """Copy a batch's inputs or labels to the device, as stock DeepSpeed passes them: lists become tuples. ``shared``:
    nobody changes them, as a layer may, so on the host they need no copy.
    """
    if torch.is_tensor(value):
        return device.from_host((value,), "a batch", shared=shared).wait(COPY_S)[0]
    return tuple(batch_part(item, device, shared) for item in value) if isinstance(value, (tuple, list)) else value


def outgoing(outputs: Any) -> Tensors:
    """Return the last layer's output as a tuple of strided tensors; raises RecycleError if it cannot travel."""
    members = outputs if isinstance(outputs, tuple) else (outputs,)
    wrong = [found for member in members if (found := _wrong(member))]
    if wrong or not members:
        found = ", ".join(wrong) or "an empty tuple"
        raise RecycleError(
            f"the last layer of a stage gives {found}: it has to give the next stage a tensor, or a tuple of tensors"
        )
    return tuple([member.resolve_conj().resolve_neg() for member in members])


def _wrong(member: Any) -> str | None:
    if not torch.is_tensor(member):
        return type(member).__name__
    if member.layout is not torch.strided or member.is_nested or member.is_quantized:
        return f"a {'nested' if member.is_nested else 'quantized' if member.is_quantized else 'sparse'} tensor"
    return None


def differentiable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of this dtype (floating-point or complex) has a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def packed(outputs: Any, members: Tensors) -> Tensors:
    """Return what travels to the next stage for ``outputs``: the ``members``, and the mark if it is needed."""
    marked = isinstance(outputs, tuple) and (len(members) == 1 or _is_mark(members[-1]))
    return (*members, MARK) if marked else members


def incoming(tensors: Tensors) -> Any:
    """Return the input of a stage's first layer, a tensor or a tuple, as copies: the layer may change them."""
    marked = _is_mark(tensors[-1])
    members = tuple([tensor.clone() for tensor in (tensors[:-1] if marked else tensors)])
    return members if marked or len(members) > 1 else members[0]


def gradients(inputs: Tensors) -> Tensors:
    """Return the gradients of ``inputs`` that travel back; a mark if nothing was computed from an input."""
    return tuple([MARK if tensor.grad is None else tensor.grad for tensor in inputs if tensor.requires_grad])


def with_gradients(outputs: Tensors, grads: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each output that has a graph with its gradient; outputs that nothing was computed from are left out."""
    members = [output for output in outputs if differentiable(output)]
    return [
        (output, grad)
        for output, grad in zip(members, grads, strict=True)
        if output.requires_grad and not _is_mark(grad)
    ]


def _is_mark(tensor: torch.Tensor) -> bool:
    return tensor.dtype == MARK.dtype and tensor.shape == MARK.shape
