"""Models of the shapes that people have, with kills: as uncut in one process, or as stock DeepSpeed (see
tests/jobs/shapes.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.cluster import Result
from tests.support.jobs import LOSS_TOLERANCE, PARAMETER_TOLERANCE, SQUARE

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
import shapes_models as models


@pytest.fixture
def train(launch, tmp_path):
    """``train(case, *faults, enabled=, settings=, **more)``: the finished job, with ``settings`` of the plugin's and
    ``more`` of DeepSpeed's.
    """
    folders: list[str] = []

    def run(
        case: str, *faults: str, enabled: bool = True, settings: Mapping[str, object] = {}, **more: object
    ) -> Result:
        folders.append(str(tmp_path / f"run{len(folders)}"))
        job = {
            "case": case,
            "folder": folders[-1],
            "enabled": enabled,
            "faults": faults,
            "more": more,
            "settings": settings,
        }
        result = launch(shape=SQUARE, script="tests/jobs/shapes.py", RECYCLE_TEST_SHAPES=json.dumps(job)).finish()
        assert result.code == 0 and len(result.of("lost")) == len(faults), result.output[-6000:]
        return result

    return run


def uncut(case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in this process: the losses, and the weights by the names that they have in the pipeline."""
    layers = {}
    for number, (kind, *arguments) in enumerate(models.model_layers(case)):
        torch.manual_seed(1234 + number)  # as PipelineModule's seed_layers does
        layers[str(number)] = kind(*arguments)
    module = torch.nn.ModuleDict(layers)
    optimizer = torch.optim.AdamW(models.groups(module), lr=0.01)
    data, losses = models.Texts(), []
    for step in range(models.STEPS):
        found = []
        # replicas take turns with samples: two of every second one make a micro-batch
        for index in range(models.A_STEP // models.SIZE):
            replica, micro_batch = index % models.REPLICAS, index // models.REPLICAS
            first = step * models.A_STEP + micro_batch * models.REPLICAS * models.SIZE + replica
            batch = torch.utils.data.default_collate(
                [data[first + turn * models.REPLICAS] for turn in range(models.SIZE)]
            )
            given = (batch["ids"], batch["mask"])
            for layer in module.values():
                given = layer(given)
            found.append(models.loss_of(case)(given, batch["labels"]))
        (sum(found) / models.MICRO_BATCHES).backward()  # over replicas, gradients are summed
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).mean().item())
    return losses, {name: value.detach() for name, value in module.state_dict().items()}


def assert_weights(result: Result, expected: dict[str, torch.Tensor]) -> None:
    for rank in result.records:
        for name, value in result.parameters(rank).items():
            assert torch.allclose(value, expected[name], rtol=0, atol=PARAMETER_TOLERANCE), f"rank {rank}: {name}"


@pytest.mark.parametrize(
    "kill, settings",
    (
        ("kill 0.1 before 1W0.1@3", {}),
        *(pytest.param("kill 0.0 before 0I0.0@4", each, marks=pytest.mark.all_kills) for each in ({}, {"exact": True})),
    ),
)
def test_tuples_of_changing_shapes(train, kill, settings):
    """A bool comes first; steps 3, 4 and 6 have other shapes than those before."""
    losses, weights = uncut("tuples")
    result = train("tuples", kill, settings=settings)
    assert result.losses == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert_weights(result, weights)


@pytest.mark.parametrize(
    "kill", ("kill 0.1 before 1F0.1@3", pytest.param("kill 0.0 before 0I0.1@4", marks=pytest.mark.all_kills))
)
def test_layers_of_all_kinds_as_with_stock(train, kill):
    """Dropout too: seeded by layer and by how many forwards a replica has run, it has stock's masks, whoever runs
    it.
    """
    stock = train("layers", enabled=False)
    assert not stock.of("start")
    result = train("layers", kill)
    assert {tuple(record["layers"]) for record in result.records.values()} == {(0, 7, 8)}
    assert [event["stage"] for event in result.of("fused")] == [0] * 4, "Slope's two layers, as both workers find"
    assert result.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    assert_weights(result, {name: value for rank in stock.records for name, value in stock.parameters(rank).items()})


@pytest.mark.all_kills
def test_gradients_that_are_rounded_on_their_way_as_with_stock(train):
    more = {
        "communication_data_type": "bf16",
        "prescale_gradients": False,
        "gradient_predivide_factor": 2.0,
        "pipeline": {},
    }
    stock, result, other = train("layers", enabled=False, **more), train("layers", **more), train("layers")
    assert result.losses == pytest.approx(stock.losses, abs=LOSS_TOLERANCE)
    assert result.losses != pytest.approx(other.losses, abs=LOSS_TOLERANCE)


@pytest.mark.all_kills
@pytest.mark.parametrize(
    "settings", ({}, {"clip": "validate"}, {"exact": True, "check_replicas": 1}, {"undo": "inverse"}), ids=str
)
@pytest.mark.parametrize("kill", ("kill 0.0 before 0F0.1@3", "kill 0.1 before 1STEP@4"))
def test_a_stage_that_is_not_trained(train, kill, settings):
    more = {"gradient_clipping": 0.05 if settings else 0.0, "pipeline": {}}
    calm, result = train("frozen", settings=settings, **more), train("frozen", kill, settings=settings, **more)
    assert result.losses == (calm.losses if "exact" in settings else pytest.approx(calm.losses, abs=LOSS_TOLERANCE))
    assert_weights(result, {name: value for rank in calm.records for name, value in calm.parameters(rank).items()})
    assert bool(result.of("rejected")) == ("clip" in settings)
