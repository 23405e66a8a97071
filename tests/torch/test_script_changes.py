"""Parameters between steps: whatever torch is given of them is committed first, and whoever else has modes on torch's
stack finds them as they were left.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.state.touch import METHODS, PROPERTIES, FirstTouch
from recycle_plugin.runtime.worker.trainer import Trainer
from tests.support.stepped_worker import SteppedWorker

INPUT = torch.arange(8.0).view(2, 4) / 8


class Job:
    """A model whose steps stay uncommitted until ``settle()``, which takes the last one back and applies it otherwise:
    everything becomes twice what it was.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.model(INPUT).sum().backward()
        self.optimizer.step()
        self.first: torch.nn.Parameter = self.model[0].weight
        self.view, self.moment = self.first.data[1:3], self.optimizer.state[self.first]["exp_avg"]
        self.average = copy.deepcopy(self.model)
        self.array, self.storage = self.first.detach().numpy(), self.first.untyped_storage()
        self.committed, self.settled, self.broken = True, 0, ""
        self.seen: list[list[str]] = []  # modes on the stack while the engine was at work
        self.touch = FirstTouch(self.changed, lambda: self.committed, self.settle)

    def changed(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        for state in self.optimizer.state.values():
            yield from state.values()

    def step(self) -> None:
        with self.touch.lifted():
            self.seen.append(modes())
            # the engine touches what it likes
            assert all(parameter.requires_grad for parameter in self.model.parameters())
            self.committed = False
            if self.broken:
                raise RuntimeError(self.broken)

    def settle(self) -> None:
        with self.touch.lifted():
            if self.broken:
                raise RuntimeError(self.broken)
            self.settled += not self.committed
            self.seen.append(modes())
            if not self.committed:
                self.change()
            self.committed = True

    @torch.no_grad()
    def change(self) -> None:
        torch._foreach_mul_(list(self.changed()), 2.0)


def modes() -> list[str]:
    return [type(mode).__name__ for mode in _get_current_function_mode_stack()]


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.committed = True
    with job.touch.lifted():
        pass
    assert modes() == []


def test_a_rate_in_a_tensor_is_watched():
    """A step that is taken back takes it back too, with what the script has made of it since."""
    rate = torch.tensor(0.5)
    worker = SteppedWorker(lambda parameters: torch.optim.SGD(parameters, lr=rate))
    trainer: Any = SimpleNamespace(state=worker.state, _framework=worker.framework, _entry=None)
    assert any(tensor is rate for tensor in Trainer._changed(trainer))


# --- what is seen ---------------------------------------------------------------------------------------


def saved(given: Any) -> Any:
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file)


def in_place(job: Job, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    with torch.no_grad():
        change(job.first)
    return torch.Tensor(job.first.tolist())


def averaged(job: Job) -> list:
    with torch.no_grad():
        for mine, theirs in zip(job.average.parameters(), job.model.parameters()):
            mine.mul_(0.9).add_(theirs, alpha=0.1)
    return list(job.average.parameters())


def averaged_at_once(job: Job) -> list:
    with torch.no_grad():
        torch._foreach_lerp_(list(job.average.parameters()), list(job.model.parameters()), 0.1)
    return list(job.average.parameters())


def evaluated(job: Job) -> torch.Tensor:
    job.model.eval()
    with torch.inference_mode():
        return job.model(INPUT).clone()


READS: dict[str, Callable[[Job], Any]] = {
    "state_dict": lambda job: list(job.model.state_dict().values()),
    "state_dict of live tensors": lambda job: [value + 0 for value in job.model.state_dict(keep_vars=True).values()],
    "state_dict of a part": lambda job: list(job.model[0].state_dict().values()),
    "torch.save": lambda job: list(saved(job.model.state_dict()).values()),
    "torch.save of parameters": lambda job: saved(list(job.model.parameters())),
    "deepcopy": lambda job: list(copy.deepcopy(job.model).parameters()),
    "copy": lambda job: copy.copy(job.first),
    "pickle": lambda job: pickle.loads(pickle.dumps(job.first)),
    "named_parameters": lambda job: [parameter.norm() for _, parameter in job.model.named_parameters()],
    "numpy": lambda job: job.first.detach().numpy().copy(),
    "numpy of a kept view": lambda job: numpy.asarray(job.view).copy(),
    "asarray": lambda job: numpy.asarray(job.first.detach()).copy(),
    "numpy by DLPack": lambda job: numpy.from_dlpack(job.view).copy(),
    "torch by DLPack": lambda job: torch.from_dlpack(job.first.detach()) + 0,
    "item": lambda job: job.view[0, 0].item(),
    "tolist": lambda job: job.view.tolist(),
    "float": lambda job: float(job.view[0, 0]),
    "repr": lambda job: repr(job.view),
    "data": lambda job: job.first.data + 0,
    "memory": lambda job: job.first.data_ptr() and job.storage.tolist(),
    "a new storage": lambda job: job.view.untyped_storage().tolist(),
    "sum of a kept view": lambda job: job.view.sum(),
    "flat": lambda job: torch.nn.utils.parameters_to_vector(job.model.parameters()) + 0,
    "foreach": lambda job: torch._foreach_norm(list(job.model.parameters())),
    "out=": lambda job: torch.add(INPUT[:2], job.view, out=torch.empty(2, 4)),
    "operator": lambda job: torch.ops.aten.sum.default(job.view),
    "equality": lambda job: torch.equal(job.view, torch.zeros(2, 4)) or job.view + 0,
    "moments": lambda job: job.moment + 0,
    "optimizer's state_dict": lambda job: [
        value + 0 for state in job.optimizer.state_dict()["state"].values() for value in state.values()
    ],
    "exponential average": averaged,
    "average at once": averaged_at_once,
    "swa_utils": lambda job: list(torch.optim.swa_utils.AveragedModel(job.model).parameters()),
    "evaluation": evaluated,
    "evaluation of a part": lambda job: job.model[2](INPUT),
    "functional_call": lambda job: torch.func.functional_call(job.model, dict(job.model.named_parameters()), INPUT),
    "torch.func.grad": lambda job: torch.func.grad(lambda weight: weight.pow(3).sum())(job.view),
    "torch.func.vmap": lambda job: torch.vmap(lambda row: row * row)(job.first),
    "autograd.grad": lambda job: torch.autograd.grad(job.model(INPUT).pow(2).sum(), job.first),
    "autograd.Function": lambda job: Product.apply(INPUT, job.first),
    "fork": lambda job: forked(job, lambda: job.first.tolist()),
    "in place": lambda job: in_place(job, lambda weight: weight.add_(1.0)),
    "clamped data": lambda job: in_place(job, lambda weight: weight.data.clamp_(-0.1, 0.1)),
    "copied over": lambda job: in_place(job, lambda weight: weight.copy_(weight + 1)),
    "an element": lambda job: in_place(job, lambda weight: weight.__setitem__((0, 0), 5.0)),
    "through a kept view": lambda job: in_place(job, lambda weight: job.view.add_(1.0)),
    "foreach in place": lambda job: in_place(job, lambda weight: torch._foreach_add_([weight], 1.0)),
    "an optimizer of the script's": lambda job: in_place(job, lambda weight: torch.optim.SGD([weight], lr=0.1).step()),
    "other data": lambda job: in_place(job, lambda weight: setattr(weight, "data", weight.data + 1)),
}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight


def forked(job: Job, function: Callable[[], Any]) -> Any:
    os.register_at_fork(before=job.touch.now)  # as the engine does
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.write(into, pickle.dumps(function()))
        os._exit(0)
    os.close(into)
    with open(out, "rb") as file:
        value = pickle.loads(file.read())
    os.waitpid(child, 0)
    return value


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, (torch.Tensor, numpy.ndarray)) else value


@pytest.mark.parametrize("read", READS)
def test_it_is_committed_before(job: Job, read: str) -> None:
    other = Job()
    other.change()
    job.step()
    found, expected = plain(READS[read](job)), plain(READS[read](other))
    assert job.settled == 1
    assert found == expected
    assert plain(list(job.model.parameters())) == plain(list(other.model.parameters()))


@pytest.mark.parametrize("read", [name for name in READS if name != "an optimizer of the script's"])
def test_it_would_show(read: str) -> None:
    """The reads are of what the settling changes."""
    before, after = Job(), Job()
    after.change()
    assert plain(READS[read](before)) != plain(READS[read](after))


ESCAPES: dict[str, Callable[[Job], Any]] = {
    "a kept array": lambda job: job.array.tolist(),
    "a kept storage": lambda job: job.storage.tolist(),
    "to_dlpack": lambda job: torch.from_dlpack(torch.utils.dlpack.to_dlpack(job.first)),
    "TorchScript": lambda job: job.scripted(INPUT),
    "another thread": lambda job: in_thread(lambda: job.first.tolist()),
}


def in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("read", ESCAPES)
def test_what_escapes_is_what_the_module_says(job: Job, read: str) -> None:
    job.scripted = torch.jit.trace(job.model, INPUT)
    job.step()
    ESCAPES[read](job)
    assert not job.settled
    job.settle()
    ESCAPES[read](job)


# --- when ------------------------------------------------------------------------------------------------


def test_only_the_first_touch_waits(job: Job) -> None:
    job.step()
    for _ in range(3):
        job.first.sum()
    assert job.settled == 1
    job.step()
    assert job.settled == 1
    job.moment.sum()
    assert job.settled == 2


def test_other_tensors_and_what_the_engine_does_wait_for_nothing(job: Job) -> None:
    for _ in range(3):
        job.step()
        loss = torch.stack([torch.tensor(1.0), INPUT.mean()]).sum()
        assert loss.item() and job.average[0].weight.norm() and torch.empty(0).tolist() == []
        with job.touch.lifted(), job.touch.lifted():
            job.first.sum()
        assert not job.settled
    job.first.sum()
    assert job.settled == 1


def test_what_only_describes_a_tensor_waits_for_nothing(job: Job) -> None:
    job.step()
    description = [
        describe(job.first)
        for describe in (len, *(lambda tensor, name=name: getattr(tensor, name) for name in PROPERTIES))
    ]
    description += [getattr(job.first, name)() for name in METHODS]
    assert not job.settled
    assert description[:5] == [4, torch.device("cpu"), torch.float32, torch.Size([4, 4]), 2]


def test_nothing_is_on_the_stack_where_all_is_committed(job: Job) -> None:
    with job.touch.lifted():
        job.first.sum()
    assert modes() == []
    job.step()
    assert modes() == ["FirstTouch"]
    job.settle()
    assert modes() == []


def test_parameters_that_have_other_memory_now_are_seen_too(job: Job) -> None:
    job.step()
    job.first.data = torch.zeros(4, 4)
    kept = job.first.data
    job.step()
    kept.sum()
    assert job.settled == 2


def test_it_guards_after_an_error_of_the_engine_too(job: Job) -> None:
    job.broken = "no data"
    with pytest.raises(RuntimeError, match="no data"):
        job.step()
    for _ in range(2):  # what could not be settled is not shown
        with pytest.raises(RuntimeError, match="no data"):
            job.first.sum()
    job.broken = ""
    job.first.sum()
    assert job.settled == 1


def test_the_end_of_the_job_comes_through_the_touch(job: Job) -> None:
    def settle() -> None:
        raise JobEnded("stage 1 is gone", failed=True)

    job.touch._settle = settle
    job.step()
    with Counting(), pytest.raises(JobEnded, match="stage 1 is gone"):
        try:
            job.first.sum()
        except Exception:
            pass
    assert modes() == ["FirstTouch"]


def test_a_tensor_that_the_commit_has_replaced_is_not_read(job: Job) -> None:
    def change() -> None:
        job.optimizer.state[job.first]["exp_avg"] = torch.ones(4, 4)

    job.change = change
    job.step()
    with pytest.raises(RecycleError, match="get it from the optimizer again"):
        job.moment.sum()
    assert job.optimizer.state[job.first]["exp_avg"].sum() == 16


def test_two_threads_are_told_apart(job: Job) -> None:
    def attempt() -> str:
        try:
            job.settle()
        except RecycleError as error:
            return str(error)
        return "settled"

    with job.touch.lifted():
        assert "while it is at work in another one" in in_thread(attempt)
    job.step()
    assert in_thread(attempt) == "settled" and modes() == ["FirstTouch"]
    job.first.sum()
    assert job.settled == 1


# --- beside other modes ----------------------------------------------------------------------------------


class Counting(TorchFunctionMode):
    """A mode of the script's."""

    def __init__(self) -> None:
        self.calls = 0

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "a mode": Counting,
    "a device": lambda: torch.device("cpu"),
    "the default device": default_device,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
class TestBeside:
    def test_around_a_step(self, job: Job, mode: str) -> None:
        with MODES[mode]():
            before = modes()
            job.step()
            assert len(modes()) == len(before) + 1
        assert modes() == ["FirstTouch"]
        job.first.sum()
        assert job.settled == 1

    def test_around_the_touch(self, job: Job, mode: str) -> None:
        job.step()
        with MODES[mode]():
            before = modes()
            job.first.sum()
            assert job.settled == 1 and modes() == before
        assert all(name != "Counting" for name in job.seen[-1])

    def test_across_steps(self, job: Job, mode: str) -> None:
        job.step()
        with MODES[mode]():
            held = [name for name in modes() if name != "FirstTouch"]
            for steps in range(2):
                job.step()
                assert "FirstTouch" not in job.seen[-1]
                assert sorted(modes()) == sorted([*held, "FirstTouch"])
                job.view.sum()
                assert job.settled == steps + 1
                job.settle()
                assert modes() == held
        job.step()
        assert modes() == ["FirstTouch"]

    def test_left_and_entered_again_in_between(self, job: Job, mode: str) -> None:
        with MODES[mode]():
            with Counting() as inner:
                job.step()
            calls = inner.calls
            with MODES[mode]():
                job.step()
            job.first.sum()
            assert inner.calls == calls
        assert job.settled == 1 and modes() == ["FirstTouch"]


def test_the_scripts_mode_does_not_see_the_engine_settle(job: Job) -> None:
    job.step()
    with Counting() as counting:
        job.first.sum()
    assert job.settled == 1 and counting.calls == 1 and job.seen[-1] == []


def test_it_is_seen_inside_of_another_mode(job: Job) -> None:
    class Reads(Counting):
        def __torch_function__(
            self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            self.norm = job.first.norm().item()
            return super().__torch_function__(function, types, args, kwargs)

    job.step()
    with Reads() as reads:
        INPUT.sum()
    assert job.settled == 1 and reads.norm == job.first.norm().item()


class Zeros(TorchDispatchMode):
    """A mode of the script's below torch's functions, which alters what they give."""

    def __torch_dispatch__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return torch.zeros_like(made) if isinstance(made, torch.Tensor) else made


def traced(read: Callable[[], object]) -> None:
    torch.jit.trace(lambda given: given + read(), torch.ones(3), check_trace=False)


def under(mode: Callable[[], Any], read: Callable[[], object]) -> None:
    with mode():
        read()


AROUND = {
    "a dispatch mode": partial(under, Zeros),
    "fake tensors": partial(under, partial(FakeTensorMode, allow_non_fake_inputs=True)),
    "make_fx": lambda read: make_fx(lambda given: given + read())(torch.ones(3)),
    "a trace": traced,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("around", AROUND)
def test_the_engine_computes_outside_of(around: str) -> None:
    weight, made = torch.ones(3), []

    def settle() -> None:
        with touch.lifted():
            made.append((weight * 2, torch._C._get_tracing_state()))

    touch = FirstTouch(lambda: [weight], lambda: bool(made), settle)
    with touch.lifted():
        pass
    AROUND[around](lambda: weight * 1)
    ((computed, tracing),) = made
    assert type(computed) is torch.Tensor and computed.tolist() == [2.0] * 3 and tracing is None
    with touch.lifted():
        pass
    assert modes() == []


def test_gradients_are_no_touch() -> None:
    """Between two steps there are none: ``zero_grad()`` there reads and changes nothing."""
    weight = torch.nn.Parameter(torch.full((3,), 0.5))
    settled = []
    touch = FirstTouch(lambda: [weight], lambda: bool(settled), lambda: settled.append(True))
    with touch.lifted():
        pass
    assert weight.grad is None
    weight.grad = None
    torch.optim.SGD([weight], lr=0.1).zero_grad()
    assert not settled
    assert weight.sum().item() == 1.5 and settled
    with touch.lifted():
        pass
    assert modes() == []


def test_what_a_newcomers_script_writes_is_dropped_and_what_it_reads_is_not_shown() -> None:
    weight, own = torch.nn.Parameter(torch.full((3,), 0.5)), torch.zeros(3)

    def show() -> None:
        raise RecycleError("it is not here yet")

    touch = FirstTouch(lambda: [weight], lambda: True, show, lambda: True)
    with touch.lifted():
        pass
    try:
        with torch.no_grad():
            for write in (weight.clamp_, weight.data.clamp_, weight.detach().view(-1).clamp_):
                assert write(-0.1, 0.1).shape == (3,)
            weight *= 0.0
            weight.data = own
            weight[0] = 1.0
            torch.clamp(weight, 0, 0, out=weight)
            torch._foreach_zero_([weight])
            torch.nn.init.zeros_(weight)
        weight.requires_grad_(True).grad = None
        torch.optim.SGD([weight], lr=0.1).zero_grad()
        for read in (lambda: weight + 1, weight.tolist, lambda: weight.norm().item(), lambda: own.copy_(weight)):
            with pytest.raises(RecycleError, match="not here yet"):
                read()
    finally:
        touch._follows = lambda: False
        with touch.lifted():
            pass
    assert modes() == [] and weight.tolist() == [0.5] * 3
