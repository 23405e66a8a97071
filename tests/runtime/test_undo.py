"""What all ways of undo promise, and the snapshots' exactness: a step that is taken back leaves no bit behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from recycle_plugin.runtime.devices.host import CPU
from recycle_plugin.runtime.state.stage_state import StageState
from recycle_plugin.runtime.state.undo import KINDS
from tests.support.optimizers import INVERTIBLE, OTHERS, Subject, same

ALL = INVERTIBLE | OTHERS
EXACT = "snapshot", "host_snapshot"


# --- snapshots --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("earlier", [0, 1, 4])
def test_undo_and_redo_are_exact(name, earlier, way):
    """``earlier`` 0: the very first step, which creates the optimizer's state."""
    subject, straight = Subject(ALL[name], way), Subject(ALL[name])
    for seed in range(earlier):
        subject.step(subject.random(seed))
        straight.step(straight.random(seed))
    before = subject.state()
    subject.step(subject.random(99, scale=1e6))
    wrong = subject.state()
    subject.undo.restore()
    assert same(subject.state(), before) and not same(wrong, before)
    subject.step(subject.random(7))
    straight.step(straight.random(7))
    assert same(subject.state(), straight.state())


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@given(
    way=st.sampled_from(EXACT),
    name=st.sampled_from([*ALL]),
    shapes=SHAPES,
    dtype=st.sampled_from(DTYPES),
    steps=st.integers(0, 2),
    spike=st.floats(-1e30, 1e30),
)
@hypothesis_settings(max_examples=60)
def test_any_step_comes_back_bit_for_bit(way, name, shapes, dtype, steps, spike):
    """Gradients that overflow included, whatever they leave behind."""
    subject = Subject(ALL[name], way, [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes])
    for seed in range(steps):
        subject.step(subject.random(seed))
    before = subject.state()
    subject.step([gradient * spike for gradient in subject.random(50)])
    subject.undo.restore()
    assert same(subject.state(), before)


def test_a_hundred_cycles_do_not_drift():
    subject = Subject(ALL["adam"])
    subject.step(subject.random(1))
    before = subject.state()
    for seed in range(100):
        subject.step(subject.random(seed, scale=10.0**seed % 1e30))
        subject.undo.restore()
    assert same(subject.state(), before)


@pytest.mark.parametrize("way", EXACT)
def test_a_snapshot_holds_parameters_moments_and_step_counts(way):
    parameter = torch.nn.Parameter(torch.zeros(100))
    subject = Subject(ALL["adam"], way, [parameter])
    subject.step(subject.random(1))
    subject.step(subject.random(2))
    assert subject.undo.held_bytes == 12 * 100 + 4


def test_a_copy_that_was_begun_is_not_made_again(monkeypatch):
    subject, asked = Subject(ALL["adam"], "host_snapshot"), []
    subject.step(subject.random(1))
    to_host = CPU.to_host
    monkeypatch.setattr(CPU, "to_host", lambda given, *more, **named: asked.append(1) or to_host(given, *more, **named))
    subject.undo.prepare()
    assert len(asked) == 1
    before = subject.state()
    subject.undo.prepare()
    subject.step(subject.random(2))
    assert len(asked) == 1
    subject.undo.restore()
    assert same(subject.state(), before)


@pytest.mark.parametrize("what", ("a parameter", "a moment", "a tensor in its place"))
def test_what_is_changed_after_the_copy_was_begun_is_copied_again(what):
    subject = Subject(ALL["adam"], "host_snapshot")
    subject.step(subject.random(1))
    subject.undo.prepare()
    state = subject.optimizer.state[subject.parameters[0]]
    with torch.no_grad():
        if what == "a tensor in its place":
            state["exp_avg"] = state["exp_avg"] * 2
        else:
            (subject.parameters[0] if what == "a parameter" else state["exp_avg"]).mul_(2)
    before = subject.state()
    subject.step(subject.random(2))
    subject.undo.restore()
    assert same(subject.state(), before)


def test_a_snapshot_beside_the_state_does_not_look_at_it_before_the_step(monkeypatch):
    subject, looked = Subject(ALL["sgd"], "snapshot"), []
    monkeypatch.setattr(StageState, "tensors", lambda state, following=True: looked.append(following) or {})
    subject.undo.prepare()
    assert not looked
    subject.undo.before_step()
    assert looked == [False]


# --- all --------------------------------------------------------------------------------------------


@pytest.fixture(params=[*KINDS])
def kind(request) -> str:
    return request.param


def test_nothing_is_taken_back_once_the_next_step_is_prepared(kind):
    subject = Subject(ALL["adam"], kind)
    subject.step(subject.random(1))
    subject.undo.prepare()
    with pytest.raises(RuntimeError, match="^no step to take back"):
        subject.undo.restore()


def test_parameters_and_moments_keep_their_storage(kind):
    """Both are views into flat buffers, as DeepSpeed's may be; whoever holds the flat buffer sees the old values
    too.
    """
    flat = torch.arange(10.0)
    views = [torch.nn.Parameter(flat[:6].view(2, 3)), torch.nn.Parameter(flat[6:])]
    subject = Subject(ALL["adam"], kind, views)
    subject.step(subject.random(1))
    moments = torch.cat([subject.optimizer.state[p]["exp_avg"].flatten() for p in views])
    for view, moment in zip(views, moments.split([6, 4])):
        subject.optimizer.state[view]["exp_avg"] = moment.view(view.shape)
    kept = flat.clone(), moments.clone()
    subject.step(subject.random(2))
    assert not torch.equal(flat, kept[0]) and not torch.equal(moments, kept[1])
    subject.undo.restore()
    torch.testing.assert_close((flat, moments), kept, rtol=1e-6, atol=1e-7)
    assert {p.untyped_storage().data_ptr() for p in views} == {flat.untyped_storage().data_ptr()}


def test_schedules_counts_and_hyper_parameters_come_back_exactly(kind):
    subject = Subject(ALL["adamw"], kind)
    subject.step(subject.random(1))
    before = subject.state()
    subject.step(subject.random(2))
    subject.optimizer.param_groups[0] |= {"weight_decay": 0.7, "betas": (0.1, 0.2), "new": 1}
    subject.undo.restore()
    after = subject.state()
    assert after["param_groups"] == before["param_groups"] and after["scheduler"] == before["scheduler"]
    assert after["count"] == 1
    assert [state["step"].item() for state in after["state"].values()] == [1, 1]


def test_a_learning_rate_in_a_tensor_comes_back_into_that_tensor(kind):
    rate = torch.tensor(0.25)
    subject = Subject(lambda ps: torch.optim.SGD(ps, lr=rate), kind)
    subject.step(subject.random(1))
    assert rate == 0.125
    subject.undo.restore()
    assert rate == 0.25 and subject.optimizer.param_groups[0]["lr"] is rate


def test_each_group_is_taken_back_with_its_own_hyper_parameters(kind):
    def make(parameters):
        slow, fast = parameters
        return torch.optim.SGD(
            [{"params": [slow]}, {"params": [fast], "lr": 4.0, "momentum": 0.5, "maximize": True}], lr=0.5, momentum=0.9
        )

    subject = Subject(make, kind)
    for seed in range(2):
        subject.step(subject.random(seed))
    before = subject.state()
    subject.step(subject.random(3))
    subject.undo.restore()
    torch.testing.assert_close(subject.state(), before, rtol=1e-6, atol=1e-6)


def test_a_parameter_without_a_gradient_is_left_alone(kind):
    subject = Subject(ALL["adamw"], kind)
    subject.step([None, subject.random(1)[1]])
    subject.step([None, subject.random(2)[1]])
    untouched = subject.parameters[0].detach().clone()
    subject.undo.restore()
    assert torch.equal(subject.parameters[0], untouched) and subject.parameters[0] not in subject.optimizer.state
    assert subject.optimizer.state[subject.parameters[1]]["step"] == 1


def test_without_a_step_there_is_no_way_back(kind):
    subject = Subject(ALL["sgd"], kind)
    with pytest.raises(RuntimeError, match="no step to take back"):
        subject.undo.restore()
    subject.step(subject.random(1))
    subject.undo.restore()
    with pytest.raises(RuntimeError, match="is taken back already"):
        subject.undo.restore()
