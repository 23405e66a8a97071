"""What holds of every Device: tests of the fixture ``device`` of who imports them."""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.worker.step_store import StepStore
from recycle_plugin.runtime.devices.host import bytes_of, on_host
from recycle_plugin.runtime.devices.kinds import fetch
from recycle_plugin.runtime.worker.tiers import AsMade, Host
from tests.support.moved import act
from tests.support.waiting import together

WAIT_S = 30.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]


def there(device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return device.from_host(tensors, "of a test", shared=False).wait(WAIT_S)


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_every_dtype_and_shape_is_the_same_bit_for_bit(device, dtype):
    tensors = tuple(torch.randint(0, 2, shape).to(dtype) for shape in [(2, 3, 4), (1,), (0, 5), ()])
    for shared in (True, False):
        copy = device.to_host(device.from_host(tensors, "", shared=shared).wait(WAIT_S), "", shared=shared)
        found = copy.wait(WAIT_S)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, tensors, strict=True))
        assert copy.poll() and copy.nbytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("shared", (True, False))
def test_what_comes_to_the_host_is_contiguous_there_and_has_no_graph(device, shared):
    (made,) = there(device, torch.arange(12.0).reshape(3, 4))
    (found,) = device.to_host([made.t().requires_grad_() * 1], "", shared=shared).wait(WAIT_S)
    assert found.is_contiguous() and on_host(found) and not found.requires_grad
    assert torch.equal(found, torch.arange(12.0).reshape(3, 4).t())


@pytest.mark.parametrize("shared", (True, False))
def test_what_torch_has_only_marked_as_conjugate_or_negative_is_computed(device, shared):
    """As the gradient of what a layer has conjugated: its memory is something else."""
    (made,) = there(device, torch.complex(torch.arange(3.0), torch.ones(3)))
    given = [made.conj(), made[:1].conj().imag]
    found = device.to_host(given, "", shared=shared).wait(WAIT_S)
    assert not any(one.is_conj() or one.is_neg() for one in found)
    assert [bytes_of(one).view(one.dtype).tolist() for one in found] == [[0 - 1j, 1 - 1j, 2 - 1j], [-1.0]]


def test_what_comes_to_the_device_is_a_leaf_without_a_graph(device):
    (found,) = device.from_host([torch.ones(3, requires_grad=True) * 2], "", shared=True).wait(WAIT_S)
    assert found.is_leaf and not found.requires_grad and found.device == device.where


def test_nothing_to_copy_is_a_copy_too(device):
    assert device.to_host((), "", shared=True).wait(WAIT_S) == device.from_host((), "", shared=True).wait(WAIT_S) == ()


def test_a_copy_can_be_waited_for_by_several_threads_and_again(device):
    copy = device.to_host(there(device, torch.arange(1000.0)), "", shared=True)
    found = together(lambda _: copy.wait(WAIT_S)[0], range(4))
    assert all(torch.equal(each, torch.arange(1000.0)) for each in (*found, *copy.wait(WAIT_S)))


def test_room_is_in_host_memory_to_be_written_to(device):
    made = device.room([2, 3], torch.bfloat16)
    made.fill_(3)
    assert on_host(made) and made.shape == (2, 3) and made.dtype is torch.bfloat16 and made.is_contiguous()
    assert torch.equal(fetch(there(device, made)[0], ""), torch.full((2, 3), 3.0, dtype=torch.bfloat16))


def test_events_happen_in_their_order(device):
    first = device.event("")
    first.wait(WAIT_S)
    second = device.event("")
    second.wait(WAIT_S)
    assert first.poll() and second.poll() and second.since(first) > 0 and first.since(second) == -second.since(first)
    assert first.since(first) == 0


def test_the_last_generator_is_the_devices_own_and_all_are_default_ones(device):
    torch.manual_seed(11)
    assert device.generators[-1].device.type == device.where.type
    assert all(generator.initial_seed() == 11 for generator in device.generators)


def test_memory_is_what_is_used_and_what_there_is(device):
    held = torch.ones(1 << 20, device=device.where)
    used, total = device.memory()
    assert held.nbytes <= used < total


def test_its_kind_is_one_that_autocast_knows(device):
    weight = there(device, torch.ones(2, 2))[0]
    with torch.autocast(device.kind, torch.bfloat16):
        assert (weight @ weight).dtype is torch.bfloat16


def test_a_store_starts_the_copy_of_what_is_sent_once_and_lets_the_original_go(device):
    store = StepStore(Seat(0, 0), 2, tiers=(AsMade(), Host(device)))
    (made,) = there(device, torch.arange(6.0))
    store.put(act(0), (made,))
    size, copy = store.weight, store.move(act(0), -1)
    assert store.move(act(0), -1) is copy is store[act(0)], "a second one is not needed for a peer that lacks it"
    assert Host(device).weigh(copy) == size == made.nbytes
    (kept,) = copy.wait(WAIT_S)
    assert torch.equal(kept, torch.arange(6.0))
