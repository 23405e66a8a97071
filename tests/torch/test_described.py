"""What a worker says of the stage that it trains, for the report: layers, parameters, precision."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recycle_plugin.runtime.stage.ports import described


class Model(nn.Module):
    """As pipelines of frameworks are: layers, tied ones in a dict of their own, and a loss that is a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tied = nn.ModuleDict({"embedding": nn.Embedding(5, 2, dtype=dtype)})
        self.first = nn.Linear(2, 3, dtype=dtype)
        self.frozen = nn.Linear(2, 3, dtype=torch.float64).requires_grad_(False)
        self.loss = nn.MSELoss()


def framework(dtype: torch.dtype, masters: object = None, compute: object = None) -> SimpleNamespace:
    module = Model(dtype)
    model = SimpleNamespace(module=module, loss=module.loss)
    layers = *module.tied.values(), module.first, module.frozen
    return SimpleNamespace(
        seat=SimpleNamespace(stage=1), model=model, masters=masters, compute=compute, layers=layers, tied=()
    )


@pytest.mark.parametrize(
    "given, layers, precision",
    [
        (framework(torch.float32), ["Embedding", "Linear", "Linear"], "fp32"),
        (framework(torch.bfloat16, masters="some"), ["Embedding", "Linear", "Linear"], "bf16, with fp32 masters"),
        (framework(torch.float16, compute="the script's"), ["Model"], "fp16"),
    ],
    ids=("fp32", "bf16", "scripted"),
)
def test_layers_parameters_and_precision(given, layers, precision):
    """What is frozen is a layer, and no parameter that is trained."""
    assert described(given) == {"stage": 1, "layers": layers, "parameters": 10 + 9, "precision": precision}


def test_parameters_of_several_kinds_are_named_each():
    given = framework(torch.float32)
    given.model.module.frozen.requires_grad_(True)
    assert described(given)["precision"] == "fp32, fp64"
