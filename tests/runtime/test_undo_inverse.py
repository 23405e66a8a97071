"""Steps taken back by their update rule: within roundings of the largest value that met in them, and refused where that
fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.stage.rates import around_steps
from recycle_plugin.runtime.state.undo import KINDS
from recycle_plugin.runtime.worker.stepping import undo_record
from tests.support.optimizers import INVERTIBLE, OTHERS, Lamb, Make, Subject, stage_state

ROUNDINGS = 8  # of an element, at most, in a step and its way back


# --- properties -------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Hyper-parameters of a step, under one name for all rules."""

    lr: float
    coupled: float  # weight decay that goes into the moments
    keep: dict[str, float]  # share of a moment that stays in it
    add: dict[str, float]  # share of the gradient that is added

    @classmethod
    def of(cls, group: dict) -> Rates:
        coupled = group["weight_decay"] if "momentum" in group or not group.get("decoupled_weight_decay", True) else 0.0
        if "momentum" in group:
            return cls(
                group["lr"],
                coupled,
                {"momentum_buffer": group["momentum"]},
                {"momentum_buffer": 1 - group["dampening"]},
            )
        keep = dict(zip(("exp_avg", "exp_avg_sq"), group["betas"]))
        return cls(group["lr"], coupled, keep, {name: 1 - beta for name, beta in keep.items()})


def assert_came_back(subject: Subject, before: dict, stepped: dict, gradients: list[torch.Tensor]) -> None:
    """Every element within ROUNDINGS of the largest value that met in it."""
    after, rates = subject.state(), Rates.of(before["param_groups"][0])
    assert after["state"].keys() == before["state"].keys() and after["count"] == before["count"]
    for index, gradient in enumerate(gradients):
        limits = torch.finfo(gradient.dtype)
        unit, least = ROUNDINGS * limits.eps, ROUNDINGS * limits.tiny
        p, moved = before["parameters"][index], stepped["parameters"][index]
        largest = p.abs() + moved.abs()
        if "momentum_buffer" in rates.keep:
            largest = largest + rates.lr * gradient.abs() * (1 + rates.keep["momentum_buffer"])
        allowed = unit * largest + least
        assert_within(after["parameters"][index], p, allowed)
        for name, old in before["state"].get(index, {}).items():
            new, made = after["state"][index][name], stepped["state"][index][name]
            if name not in rates.keep:
                assert new == old
            elif rates.keep[name]:
                given = gradient.abs() + rates.coupled * p.abs()
                error = rates.coupled * allowed
                if name == "exp_avg_sq":
                    given, error = given**2, 2 * given * error + error**2
                assert_within(
                    new,
                    old,
                    (unit * (made.abs() + rates.add[name] * given) + rates.add[name] * error + least)
                    / rates.keep[name],
                )


def assert_within(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> None:
    assert ((a - b).abs() <= allowed).all(), ((a - b).abs() / allowed).max()


SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=3)


@given(
    name=st.sampled_from([*INVERTIBLE]),
    shapes=SHAPES,
    dtype=st.sampled_from((torch.float32, torch.float64)),
    earlier=st.integers(0, 3),
    zeros=st.sampled_from((0.0, 0.5, 1.0)),
    ordinary=st.integers(-8, 3),
    spike=st.integers(-12, 12),
)
@hypothesis_settings(max_examples=200)
def test_any_step_comes_back(name, shapes, dtype, earlier, zeros, ordinary, spike):
    """``zeros``: share of the elements that had no gradient before this step, so that their moments are 0."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]
    subject = Subject(INVERTIBLE[name], "inverse", parameters)
    kept = [torch.rand(shape, generator=generator) >= zeros for shape in shapes]
    for seed in range(earlier):
        subject.step([gradient * mask for gradient, mask in zip(subject.random(seed, 10.0**ordinary), kept)])
    before, gradients = subject.state(), subject.random(50, 10.0 ** (ordinary + spike))
    subject.step(gradients)
    stepped = subject.state()
    subject.undo.restore()
    assert_came_back(subject, before, stepped, gradients)


@pytest.mark.parametrize("name", INVERTIBLE)
@pytest.mark.parametrize("spike", (1.0, 1e6))
def test_a_redo_with_the_same_gradient_ends_where_the_first_try_did(name, spike):
    """Also after a spike: what recovery does.  The largest values are met again."""
    subject = Subject(INVERTIBLE[name], "inverse")
    for seed in range(5):
        subject.step(subject.random(seed))
    gradients = subject.random(50, spike)
    subject.step(gradients)
    first = subject.state()
    subject.undo.restore()
    subject.step(gradients)
    for tried, again in zip(tensors(first), tensors(subject.state()), strict=True):
        torch.testing.assert_close(again, tried, rtol=1e-5, atol=1e-6)


def tensors(state: dict) -> list[torch.Tensor]:
    return [
        *state["parameters"],
        *(moment for moments in state["state"].values() for moment in moments.values() if torch.is_tensor(moment)),
    ]


@pytest.mark.parametrize("name", [name for name in INVERTIBLE if "without memory" not in name])
def test_three_hundred_cycles_of_one_step_drift_no_further_than_their_roundings(name):
    subject = Subject(INVERTIBLE[name], "inverse")
    for seed in range(3):
        subject.step(subject.random(seed))
    before, gradients = subject.state(), subject.random(50)
    for _ in range(300):
        subject.step(gradients)
        subject.undo.restore()
    for kept, drifted in zip(tensors(before), tensors(subject.state()), strict=True):
        torch.testing.assert_close(drifted, kept, rtol=0, atol=300 * torch.finfo(kept.dtype).eps)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_a_training_whose_every_step_is_taken_back_once_learns_the_same(name):
    """200 steps, undone and done again, against 200 steps."""
    cycled, straight = (Subject(INVERTIBLE[name], kind) for kind in ("inverse", "snapshot"))
    for subject in (cycled, straight):
        subject.scheduler.gamma = 0.99
    for seed in range(200):
        gradients = straight.random(seed)
        straight.step(gradients)
        cycled.step(gradients)
        cycled.undo.restore()
        cycled.step(gradients)
    for expected, found in zip(tensors(straight.state()), tensors(cycled.state()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- cases of their own -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "nesterov", "momentum, fused"])
def test_momentums_first_step_leaves_no_buffer(name):
    """Which sets the buffer to the gradient, without dampening: redone, it does so again."""
    subject, straight = (Subject(INVERTIBLE[name], "inverse") for _ in range(2))
    subject.step(subject.random(1))
    subject.undo.restore()
    assert not any("momentum_buffer" in state for state in subject.optimizer.state.values())
    for each in (subject, straight):
        each.step(each.random(2))
    for expected, found in zip(tensors(straight.state()), tensors(subject.state()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


RATE = 0.01  # of Adam in INVERTIBLE


def moved_after_a_first_touch() -> torch.Tensor:
    """How far a parameter goes that, like rows of an embedding, has v = 0 until a step that is taken back, and then no
    gradient.

    In units of the learning rate, and without weight decay's share.
    """
    subject = Subject(INVERTIBLE["adam"], "inverse", [torch.nn.Parameter(torch.ones(1000))])
    untouched = [torch.zeros(1000)]
    subject.step(untouched)
    subject.step(subject.random(1))
    subject.undo.restore()
    subject.step(untouched)
    return (subject.parameters[0].detach() - 1).abs() / RATE


def test_where_v_was_zero_the_next_step_is_harmless():
    assert (moved_after_a_first_touch() < 0.01).all()


def test_without_a_clamp_it_would_not_be_a_number(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clamp_", lambda self, **limits: self)
    assert torch.isnan(moved_after_a_first_touch()).sum() > 100


def test_with_a_clamp_at_zero_it_would_be_as_large_as_any(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clamp_", lambda self, **limits: torch.clamp(self, min=0, out=self))
    moved = moved_after_a_first_touch()
    assert torch.isfinite(moved).all() and moved.max() > 0.5


@pytest.mark.parametrize("name", ["adam", "adamw", "lamb"])
def test_after_a_spike_is_taken_back_another_gradient_moves_no_parameter_far(name):
    """What v was is lost beside the spike's square; it must not come back too small."""
    subject, straight = (
        Subject(INVERTIBLE[name], "inverse", [torch.nn.Parameter(torch.ones(10000))]) for _ in range(2)
    )
    for seed in range(5):
        subject.step(subject.random(seed, 0.01))
        straight.step(straight.random(seed, 0.01))
    subject.step(subject.random(50, 1e4))
    subject.undo.restore()
    for each in (subject, straight):
        each.step(each.random(51, 0.01))
    assert ((subject.parameters[0] - straight.parameters[0]).abs() <= RATE).all()


def test_the_trust_ratio_of_the_applied_step_is_used():
    """That of the parameters that the step has made is another one."""
    subject = Subject(lambda ps: Lamb(ps, lr=0.5), "inverse")
    subject.step(subject.random(1))
    before = subject.state()
    subject.step(subject.random(2))
    wrong = [state["trust_ratio"] for state in subject.state()["state"].values()]
    subject.undo.restore()
    right = [state["trust_ratio"] for state in before["state"].values()]
    assert [state["trust_ratio"] for state in subject.optimizer.state.values()] == right and wrong != right
    torch.testing.assert_close([p.data for p in subject.parameters], before["parameters"], rtol=1e-5, atol=1e-6)


def test_it_holds_one_gradient():
    subject = Subject(INVERTIBLE["adam"], "inverse", [torch.nn.Parameter(torch.zeros(100))])
    subject.step(subject.random(1))
    subject.step(subject.random(2))
    assert subject.undo.held_bytes == 4 * 100 + 4


# --- refused ----------------------------------------------------------------------------------------


class Changed(torch.optim.SGD):
    """A subclass may do anything."""


class OwnSgd(torch.optim.Optimizer):
    """As torch's, but without its other settings."""

    undo_rule = "sgd"

    def __init__(self, params, lr) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})


class NoRatio(Lamb):
    undo_rule = "lamb"

    def _update(self, parameter, group):
        super()._update(parameter, group)
        del self.state[parameter]["trust_ratio"]


def single(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, dtype=dtype))]


@pytest.mark.parametrize(
    ("make", "dtype", "wrong", "instead"),
    [
        (OTHERS["amsgrad"], torch.float32, "cannot take AMSGrad back", "or set amsgrad to false"),
        (
            OTHERS["rmsprop"],
            torch.float32,
            "cannot take a step of RMSprop back",
            "or use SGD, Adam or AdamW of torch.optim",
        ),
        (
            lambda ps: Changed(ps, lr=0.1),
            torch.float32,
            "cannot take a step of Changed back",
            "undo_rule = one of sgd, adam, adamw, lamb",
        ),
        (INVERTIBLE["adam"], torch.bfloat16, "needs parameters in fp32 or fp64, and there are some in bfloat16", ""),
        (INVERTIBLE["sgd"], torch.complex64, "needs parameters in fp32 or fp64, and there are some in complex64", ""),
        (
            lambda ps: torch.optim.AdamW(ps, lr=1.0, weight_decay=0.9),
            torch.float32,
            "lr x weight_decay = 0.9",
            "or stay at 0.5 or less",
        ),
        (
            lambda ps: OwnSgd(ps, lr=0.1),
            torch.float32,
            "cannot take a step of OwnSgd back, which has no dampening, nesterov, weight_decay in its groups",
            "or give them their values there",
        ),
        (
            lambda ps: torch.optim.SGD([ps[0].detach().clone()], lr=0.1),
            torch.float32,
            "parameters or attributes of its own beside the model's",
            "",
        ),
    ],
    ids=["AMSGrad", "unknown", "subclass", "bf16", "complex", "decay", "settings", "master parameters"],
)
def test_what_cannot_be_inverted_is_refused_at_the_start(make: Make, dtype, wrong, instead):
    parameters = single(dtype)
    with pytest.raises(RecycleError) as caught:
        KINDS["inverse"](stage_state(parameters, make(parameters)))
    message = str(caught.value)
    assert message.startswith('recycle.undo: "inverse" ') and wrong in message and 'write "snapshot"' in message
    assert instead in message
    assert "\n" not in message


def test_frozen_parameters_are_left_as_they_are():
    trained, frozen = single()[0], torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    optimizer = torch.optim.Adam([trained, frozen], lr=0.1)
    undo = KINDS["inverse"](stage_state([trained, frozen], optimizer))
    trained.grad = torch.ones(3)
    undo.before_step()
    optimizer.step()
    assert not torch.allclose(trained, torch.ones(3))
    undo.restore()
    assert torch.allclose(trained, torch.ones(3)) and torch.equal(frozen, torch.ones_like(frozen))


def test_a_decay_that_grows_too_large_is_refused_before_the_step():
    subject = Subject(INVERTIBLE["adamw"], "inverse", single())
    subject.step(subject.random(1))
    subject.optimizer.param_groups[0]["lr"] = 6.0
    with pytest.raises(RecycleError, match="lr x weight_decay = 0.6"):
        subject.step(subject.random(2))


def clamped(optimizer, *_) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.1, 0.1)


def halved(optimizer, *_) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def test_what_a_scripts_hooks_change_behind_the_record_is_refused_before_the_step():
    """A weight that was clamped after the step, a gradient that was halved before it: no rule inverts these."""
    subject = Subject(INVERTIBLE["sgd"], "inverse", single())
    record = KINDS["inverse"](subject.stage_state)
    subject.optimizer.register_step_pre_hook(halved)  # before the record: as applied
    around_steps(subject.optimizer, record.before_step)
    subject.step(subject.random(1))
    optimizer = subject.optimizer
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        hook = register(clamped)
        try:
            with pytest.raises(RecycleError, match="cannot take a step back that the script's hook clamped may change"):
                subject.step(subject.random(2))
        finally:
            hook.remove()
    subject.step(subject.random(3))


def slowed(optimizer, *_) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("of_all", (False, True))
@pytest.mark.parametrize("change", (clamped, slowed))
def test_what_hooks_change_before_the_record_is_refused_but_for_gradients(change, of_all):
    """It would be changed once more as the step is done again."""
    subject = Subject(INVERTIBLE["adam"], "inverse", single())
    subject.optimizer.register_step_pre_hook(halved)
    register = register_optimizer_step_pre_hook if of_all else subject.optimizer.register_step_pre_hook
    hook = register(lambda which, *_: change(which) if changes else None)
    undo_record("inverse", subject.stage_state)
    changes = False
    subject.step(subject.random(1))
    changes = True
    try:
        with pytest.raises(RecycleError, match="cannot take back what the script's hooks change before a step"):
            subject.step(subject.random(2))
    finally:
        hook.remove()
    subject.step(subject.random(3))


def test_sparse_gradients_are_refused_before_the_step():
    subject = Subject(INVERTIBLE["sgd"], "inverse", single())
    with pytest.raises(RecycleError, match="sparse gradients"):
        subject.step([torch.ones(3).to_sparse()])


def test_an_optimizer_that_leaves_no_trust_ratio_is_refused_before_its_second_step():
    subject = Subject(NoRatio, "inverse", single())
    subject.step(subject.random(1))
    with pytest.raises(
        RecycleError, match="cannot take a step of NoRatio back, which leaves no trust_ratio in a parameter's state"
    ):
        subject.step(subject.random(2))


@pytest.mark.parametrize("gradient", (float("inf"), float("nan"), 1e30))
def test_a_step_that_is_not_finite_is_refused_and_left_as_it_is(gradient):
    """1e30 overflows v only."""
    subject = Subject(INVERTIBLE["adam"], "inverse", single())
    subject.step(subject.random(1))
    subject.step([torch.full((3,), gradient)])
    left = subject.state()
    with pytest.raises(RecycleError, match="infinite or not a number"):
        subject.undo.restore()
    for kept, found in zip(tensors(left), tensors(subject.state()), strict=True):
        torch.testing.assert_close(found, kept, rtol=0, atol=0, equal_nan=True)
