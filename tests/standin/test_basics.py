"""The device looks to Python as torch.cuda does."""

from __future__ import annotations

import copy
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

D = "standin"


def test_torch_finds_it(standin):
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device(D)
    assert torch.get_device_module(D) is torch.standin and torch.accelerator.device_count() == 1
    with torch.standin.device(0), torch.device(D):
        assert torch.zeros(2).device == torch.device(D, 0)
    with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
        torch.standin.set_device(1)
    assert torch.standin.get_device_properties(0).total_memory == torch.standin.mem_get_info()[1]


def test_operations_give_what_the_cpu_gives(standin):
    a, b = torch.randn(3, 4), torch.randint(0, 9, (3, 4))
    for made in (
        lambda a, b: (a + b).t().contiguous() @ a,
        lambda a, b: torch.cat([a, a[:, 1:]], 1).sort(descending=True).values,
        lambda a, b: a[b % 3, :2],
        lambda a, b: torch.where(a > 0, a, b.to(a.dtype)).cumsum(0),
        lambda a, b: b.bincount(minlength=9) if b.dim() == 1 else b.flatten().bincount(minlength=9),
        lambda a, b: torch.view_as_real(torch.complex(a, a).conj() * 2j),
        lambda a, b: torch.stack(a.unbind(1))[:, None].expand(-1, 2, -1).clone(memory_format=torch.contiguous_format),
        lambda a, b: (a > 0) & (b > 3),
        lambda a, b: a.masked_select(a > 0),
        lambda a, b: torch.einsum("ij,kj->ik", a, a).exp(),
        lambda a, b: torch.arange(7, device=a.device)[::2] + torch.eye(4, device=a.device, dtype=torch.int64)[0],
        lambda a, b: torch.topk(a, 2)[1],
        lambda a, b: torch.nn.functional.conv1d(a[None], a[:, None, :2], groups=3, padding=1),
        lambda a, b: a.index_put((b % 3, b % 4), torch.tensor(1.0), accumulate=True),
    ):
        expected, found = made(a, b), made(a.to(D), b.to(D))
        assert found.device.type == D and torch.equal(found.cpu(), expected) and found.stride() == expected.stride()


def test_a_convolutions_gradients(standin):
    gradients = []
    for device in ("cpu", D):
        torch.manual_seed(0)
        net = torch.nn.Conv2d(2, 3, 3)
        inputs = torch.randn(2, 2, 5, 5).to(device).requires_grad_()
        net.to(device)(inputs).square().sum().backward()
        gradients.append([tensor.grad.cpu() for tensor in (inputs, net.weight, net.bias)])
    assert all(map(torch.equal, *gradients))


def test_outputs_and_in_place(standin):
    out = torch.empty(0, device=D)
    torch.add(torch.ones(3, device=D), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    flat = torch.zeros(6, device=D)
    torch._foreach_add_([flat[:2], flat[4:]], 3)
    flat[1::2].mul_(2)
    assert flat.tolist() == [3, 6, 0, 0, 3, 6]
    flat.resize_(2).data = torch.ones(4, device=D)
    assert flat.tolist() == [1] * 4
    flat.set_(torch.arange(3.0, device=D).untyped_storage(), 1, (2,))
    assert flat.tolist() == [1, 2] and flat.clone().set_().numel() == 0
    flat.untyped_storage().resize_(16)
    assert flat.untyped_storage().nbytes() == 16 and flat.tolist() == [1, 2]


def test_tensors_travel(standin):
    a = torch.arange(4.0, device=D).requires_grad_()
    assert copy.deepcopy(a).tolist() == a.tolist() and copy.deepcopy(a).requires_grad
    file = io.BytesIO()
    torch.save({"a": a, "view": a.detach()[1:]}, file)
    for where in (None, D, "cpu"):
        file.seek(0)
        found = torch.load(file, map_location=where)
        assert found["view"].tolist() == [1, 2, 3] and found["a"].device.type == (where or D)
    net = torch.nn.Linear(2, 2).to(D)
    assert isinstance(net.weight, torch.nn.Parameter) and net.weight.device.type == D
    assert net.bfloat16().cpu().weight.dtype == torch.bfloat16


def test_a_tensor_of_the_host_beside_one_of_the_device(standin):
    on, off = torch.ones(3, device=D), torch.ones(3)
    for made in (
        lambda: on + off,
        lambda: off.add_(on),
        lambda: torch.cat([on, off]),
        lambda: torch._foreach_add_([on], [off]),
        lambda: torch.nn.functional.linear(on, off[None]),
        lambda: torch.tensor(0.0).add_(on.sum()),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), on[:, None]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            made()
    assert (on * torch.tensor(2.0)).tolist() == [2, 2, 2] and on[torch.tensor([0, 2])].tolist() == [1, 1]


def test_streams_and_events(standin):
    ours, other = torch.accelerator.current_stream(), torch.Stream(device=D)
    assert ours == torch.standin.default_stream() and other != ours
    first, second = torch.Event(D, enable_timing=True), torch.standin.Event(enable_timing=True)
    assert first.query()
    with other:
        assert torch.accelerator.current_stream() == other
        first.record()
        a = torch.ones(3, device=D) * 2
        a.record_stream(ours)
        second.record()
    with torch.standin.stream(torch.standin.Stream()):
        assert torch.standin.current_stream() not in (ours, other)
    ours.wait_event(second)
    assert a.sum().item() == 6 and second.query() and first.elapsed_time(second) >= 0
    torch.accelerator.set_stream(other)
    assert torch.standin.current_stream() == other
    second.synchronize(), other.synchronize(), torch.accelerator.synchronize()
    untimed = torch.Event(D)
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(untimed)


def test_generators(standin):
    def draw(device):
        torch.manual_seed(3)
        made = [
            torch.randn(3, device=device),
            torch.empty(5, device=device).bernoulli_(0.3).exponential_(),
            torch.randperm(5, device=device),
            torch.multinomial(torch.ones(4, device=device), 2),
            torch.randint(9, (3,), device=device),
            torch.nn.functional.dropout(torch.ones(20, device=device), 0.3),
            torch.rand(2, device=device, generator=torch.Generator(device).manual_seed(4)),
        ]
        return [tensor.cpu() for tensor in made]

    assert all(map(torch.equal, draw(D), draw("cpu")))
    before, host = standin.generators_digest(), torch.get_rng_state()
    with torch.random.fork_rng():
        torch.rand(2, device=D)
        assert standin.generators_digest() != before
    assert standin.generators_digest() == before
    state = torch.standin.get_rng_state()
    a = torch.rand(3, device=D)
    assert torch.equal(torch.get_rng_state(), host), "the host's generator has been drawn from"
    torch.standin.set_rng_state(state)
    (generator,) = torch.standin.default_generators
    assert torch.equal(a, torch.rand(3, device=D)) and generator.initial_seed() == 3
    twin = generator.clone_state()
    assert torch.equal(torch.rand(3, device=D), torch.rand(3, device=D, generator=twin))
    with pytest.raises(RuntimeError, match="Expected a 'standin' device type for generator"):
        torch.rand(3, device=D, generator=torch.Generator())


def test_memory_is_counted_exactly(standin):
    base = torch.standin.memory_allocated()
    a = torch.empty(7, device=D)
    torch.standin.reset_peak_memory_stats()
    b = torch.empty(100, dtype=torch.uint8, device=D)
    del b
    assert torch.standin.memory_allocated() - base == 28 == torch.accelerator.memory_allocated() - base
    assert torch.standin.max_memory_allocated() - base == 128 == torch.accelerator.max_memory_allocated() - base
    pinned = torch.empty(5, pin_memory=True)
    assert pinned.is_pinned() and not torch.empty(5).is_pinned() and standin.pinned_bytes() == 20
    assert torch.ones(3).pin_memory().is_pinned() and a.isnan().all()
    torch.accelerator.empty_host_cache(), torch.accelerator.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1 << 40, device=D)


def test_a_process_that_has_used_it_must_not_be_forked(standin):
    assert not torch.standin.is_initialized() and _in_fork(lambda: torch.ones(2, device=D).sum().item()) == 0
    kept = torch.ones(2, device=D)
    assert torch.standin.is_initialized() and not torch.standin._is_in_bad_fork()
    assert _in_fork(_is_refused) == 0 and kept.sum().item() == 2


def test_a_script_has_it_by_an_import_and_says_at_its_end_what_was_not_raised(standin):
    script = """
import torch
from tests.support import standin
host = torch.zeros(9, pin_memory=True)
host.copy_(torch.ones(9, device="standin"), non_blocking=True)
print(host.sum().item())
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": os.environ["HOME"]}  # without a PATH
    environment |= {"RECYCLE_TEST_STANDIN_LATE": "3"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0.0\n" and done.returncode == 0, done.stderr
    assert "never raised: standin: two accesses of pinned host memory are not ordered" in done.stderr


def test_several_devices(standin):
    script = """
import torch
from tests.support import standin
torch.standin.set_device(1)
a = torch.arange(3.0, device="standin")
b = a.to("standin:0") * 2
a.fill_(7)
try:
    a + b
except RuntimeError as error:
    print("standin:1 and standin:0" in str(error))
print(a.device, b.tolist(), torch.standin.memory_allocated(0), torch.standin.memory_allocated())
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RECYCLE_TEST_STANDIN_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\nstandin:1 [0.0, 2.0, 4.0] 12 12\n", done.stderr


def _is_refused():
    assert torch.standin._is_in_bad_fork()
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="Cannot re-initialize standin in forked subprocess"):
        torch.ones(2, device=D)


def _in_fork(what) -> int:
    """The exit status of a fork that does it, with a deadline."""
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        try:
            what()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
