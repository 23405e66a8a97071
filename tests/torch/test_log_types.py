"""The log knows torch's types by name, without torch."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.runtime.log.records import ITEM_BYTES, DatumRecord, Part
from recycle_plugin.runtime.log.segment import payload
from recycle_plugin.runtime.movers.wire import DTYPES
from tests.support.logs import act


def test_sizes_are_torchs() -> None:
    for name, size in ITEM_BYTES.items():
        if name in DTYPES:  # an older torch lacks some
            assert DTYPES[name].itemsize == size, name
    assert {"float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"} <= ITEM_BYTES.keys() & DTYPES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_a_tensors_bytes_are_a_payload_and_a_tensor_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).remainder(2)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    part = Part("", str(dtype).removeprefix("torch."), shape)
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    (view,) = payload(DatumRecord(act(1), (part,), 0).parts, [flat])
    assert view.nbytes == tensor.nbytes
    if view.nbytes:
        again = torch.frombuffer(bytearray(view), dtype=DTYPES[part.dtype]).reshape(shape)
        assert torch.equal(again, tensor)
        flat[0] ^= 1
        assert view[0] == flat[0], "nothing was copied"
