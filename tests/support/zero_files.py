"""Models whose optimizer's state is cut into files of any number of replicas."""

from __future__ import annotations

from collections.abc import Callable

import torch

MAKE: dict[str, Callable] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


def model(seed: int) -> torch.nn.Module:
    """13 and 8 numbers: no number of parts divides both.  One parameter has no dimension."""
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first": (3, 4), "scale": (), "second": (2, 2), "bias": (4,)}
    for name, shape in shapes.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()))
    return module


def load(path: str) -> dict:
    return torch.load(path, weights_only=False)


def assert_alike(mine: object, theirs: object) -> None:
    """Numbers bit for bit; parameters are tensors on one side."""
    if torch.is_tensor(mine):
        assert torch.equal(mine.detach(), theirs.detach())
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_alike(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs):
            assert_alike(one, other)
    else:
        assert mine == theirs
