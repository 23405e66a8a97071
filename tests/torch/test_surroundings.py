"""A step that is finished in the middle of something else of the script's computes as it began."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from recycle_plugin.runtime.state import surroundings
from recycle_plugin.runtime.state.surroundings import SetByScript, Surroundings


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Of a training step's forward and backward."""
    torch.manual_seed(5)
    model.zero_grad()
    model(torch.linspace(-1, 1, 8)).square().sum().backward()
    return model[0].weight.grad.clone()


BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.mark.parametrize("around", (nullcontext, lambda: torch.autocast(**BF16)), ids=("fp32", "autocast"))
@pytest.mark.parametrize(
    "meanwhile",
    (
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast(**BF16),
        lambda: torch.autocast("cpu", enabled=False),
    ),
)
def test_as_in_the_step(around, meanwhile):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    surroundings = Surroundings(model, "cpu")
    with around():
        surroundings.remember()
        expected = gradient(model)
    model.eval()
    model[2].train()
    with meanwhile():
        with surroundings.restored():
            found = gradient(model)
        assert torch.equal(found, expected)
        assert [part.training for part in model.modules()] == [False, False, False, True]
        assert model(torch.ones(8)).requires_grad == (meanwhile not in (torch.no_grad, torch.inference_mode))


def test_what_the_script_changes_for_the_next_step_is_put_off():
    model, groups = (
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)),
        [{"params": [], "lr": 0.1, "betas": (0.9, 0.99)}],
    )
    model.temperature = 2.0
    surroundings = Surroundings(model, "cpu", lambda: groups)
    assert not surroundings.changed(), "before the first step"
    surroundings.leave()
    model.eval()
    assert not surroundings.changed(), "that is put right anyway"
    groups[0]["lr"], groups[0]["betas"], model[1].p, model.temperature = 0.05, (0.8, 0.99), 0.1, 1.0
    model.called = 3
    assert sorted(surroundings.changed().values(), key=str) == [
        ((0.9, 0.99), (0.8, 0.99)),
        (0.1, 0.05),
        (0.5, 0.1),
        (2.0, 1.0),
    ]
    with surroundings.restored():
        assert (groups[0]["lr"], groups[0]["betas"], model[1].p, model.temperature) == (0.1, (0.9, 0.99), 0.5, 2.0)
        groups[0]["weight_decay"] = 0.5
    assert (groups[0]["lr"], groups[0]["betas"], model[1].p, model.temperature) == (0.05, (0.8, 0.99), 0.1, 1.0)
    assert groups[0]["weight_decay"] == 0.5 and model.called == 3
    surroundings.leave()
    assert not surroundings.changed()


def test_what_a_forward_leaves_is_nothing_that_the_script_has_set():
    """Megatron's layers keep their input, a tensor, where nothing was before the first step."""
    model = torch.nn.Linear(2, 2)
    model.given = None
    surroundings = Surroundings(model, "cpu")
    surroundings.leave()
    for given in (torch.ones(2), torch.zeros(2)):
        model.given = given
        assert not surroundings.changed()
        surroundings.leave()


def test_what_was_set_for_steps_behind_a_checkpoint_that_is_loaded_is_forgotten():
    """The steps are trained once more, and the script may set something else for them, or nothing."""
    layer = torch.nn.Linear(2, 2)
    layer.temperature = 1.0
    scripted = SetByScript(Surroundings(layer, "cpu"), layer)
    for step, value in ((1, 1.0), (2, 3.0), (1, 5.0), (2, 5.0)):
        layer.temperature = value
        scripted.begin(step)
        scripted.end()
    scripted.apply(2)
    assert layer.temperature == 5.0


def test_buffers_set_for_steps_behind_a_checkpoint_that_is_loaded_are_forgotten(monkeypatch):
    """They take no room either."""
    monkeypatch.setattr(surroundings, "MOST_BYTES", 40)
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("mask", torch.zeros(2))
    scripted = SetByScript(Surroundings(layer, "cpu"), layer)

    def set_for(step: int, value: float | None) -> None:
        if value is not None:
            layer.mask.fill_(value)
        scripted.begin(step)
        scripted.end()

    for value in (1.0, 2.0, 3.0, 4.0):
        for step in (1, 2, 3):
            set_for(step, value * step)
    for step in (3, 2, 1):
        scripted.apply(step)
        assert layer.mask.tolist() == [4.0 * step] * 2
    set_for(1, 9.0)
    set_for(2, None)
    scripted.apply(2)
    assert layer.mask.tolist() == [9.0, 9.0]


def test_what_is_left_of_a_step_trains_what_the_step_began_with():
    """The script has thawed one parameter and frozen another for the next step, and added a group."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    optimizer = torch.optim.SGD(module[1].parameters(), lr=1.0)
    surroundings = Surroundings(module, "cpu", lambda: optimizer.param_groups)
    assert surroundings.retrained == ""
    module[0].weight.requires_grad_(True)
    module[1].bias.requires_grad_(False)
    assert surroundings.retrained == "0.weight was thawed"
    optimizer.add_param_group({"params": [module[0].weight]})
    for _ in range(2):
        with surroundings.restored():
            assert [each.requires_grad for each in module.parameters()] == [False, False, True, True]
            assert len(optimizer.param_groups) == 1
        assert [each.requires_grad for each in module.parameters()] == [True, False, True, False]
        assert optimizer.param_groups[1]["params"] == [module[0].weight]
    assert surroundings.retrained == "groups of the optimizer were added or removed"
    surroundings.remember_trained()
    assert surroundings.retrained == ""
