"""Values as bytes, for other workers of the job.  They travel over sealed connections only.

Whoever reads bytes of a script's own classes runs code of theirs, as torch does in its object collectives.  So there
are two ways: what is made of tensors and plain values is read without a class being looked up; objects of a script's
are read only where the script has handed them over itself, or has them from a checkpoint.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from recycle_plugin.runtime.devices.host import HOST


def packed(value: Any) -> bytes:
    """The bytes of a value.  Raises whatever the classes in it do where they can't be pickled."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(text: bytes) -> Any:
    """The value of which :func:`packed` has made ``text``, tensors in host memory.  Raises UnpicklingError where there
    is anything but tensors and plain values in it.
    """
    return torch.load(io.BytesIO(text), map_location=HOST, weights_only=True)


def unpacked_objects(text: bytes) -> Any:
    """The same, with objects of any class: of a worker of this job, over a sealed connection, and of nobody else."""
    return torch.load(io.BytesIO(text), weights_only=False)
