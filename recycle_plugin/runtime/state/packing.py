"""Values as bytes, for other workers of the job, over sealed connections only.

Unpickling a script's own classes runs their code, as in torch's object collectives. So there are two ways. Tensors and
plain values are read without looking up any class. A script's objects are read only if the script itself handed them
over, or from a checkpoint.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from recycle_plugin.runtime.devices.host import HOST


def packed(value: Any) -> bytes:
    """Return a value's bytes. Raises the errors of classes in it that cannot be pickled."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(text: bytes) -> Any:
    """Invert :func:`packed`; tensors come to host memory. UnpicklingError for all but tensors and plain values."""
    return torch.load(io.BytesIO(text), map_location=HOST, weights_only=True)


def unpacked_objects(text: bytes) -> Any:
    """Invert :func:`packed` for objects of any class: only for bytes of this job's workers, over sealed connections."""
    return torch.load(io.BytesIO(text), weights_only=False)
