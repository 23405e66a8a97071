"""Boundary tensors arrive under their own name, whole, whatever the order; what is old is dropped."""

from __future__ import annotations

import socket

import pytest
import torch

from recycle_plugin.core.dataflow import Datum
from recycle_plugin.core.executor import Interrupted
from recycle_plugin.core.ids import MicroBatch, Seat
from recycle_plugin.core.protocol import Generation, Missing
from recycle_plugin.core.roster import Member
from recycle_plugin.runtime.errors import WaitTimeout
from recycle_plugin.runtime.transport import Transport

from .conftest import generation


def act(index: int, step: int = 1) -> Datum:
    return Datum("act", 0, MicroBatch(0, index), step)


@pytest.fixture
def pair(coordinator):
    ends = [Transport(coordinator.session(rank, wait_timeout_s=5.0)) for rank in (0, 1)]
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_every_dtype_and_shape_travels_bit_for_bit(pair, dtype):
    sender, receiver = pair
    tensors = tuple(torch.randint(0, 2, shape).to(dtype) for shape in [(2, 3, 4), (1,), (0, 5), ()])
    sender.send(receiver.address, act(0), tensors)
    received = receiver.wait(act(0), "0.0")
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(received, tensors, strict=True))


def test_non_contiguous_tensors_travel_too(pair):
    sender, receiver = pair
    tensor = torch.arange(12.0).reshape(3, 4).t()
    sender.send(receiver.address, act(0), (tensor,))
    assert torch.equal(receiver.wait(act(0), "0.0")[0], tensor)


def test_order_of_arrival_does_not_matter(pair):
    sender, receiver = pair
    for index in (2, 0, 1):
        sender.send(receiver.address, act(index), (torch.tensor([index]),))
    assert [receiver.wait(act(index), "0.0")[0].item() for index in range(3)] == [0, 1, 2]


def test_the_same_micro_batch_of_another_step_is_another_datum(pair):
    sender, receiver = pair
    sender.send(receiver.address, act(0, step=1), (torch.tensor([1]),))
    sender.send(receiver.address, act(0, step=2), (torch.tensor([2]),))
    assert receiver.wait(act(0, step=2), "0.0")[0].item() == 2
    assert receiver.wait(act(0, step=1), "0.0")[0].item() == 1


def test_what_has_arrived_is_held_until_it_is_taken_and_a_second_copy_does_no_harm(pair):
    sender, receiver = pair
    for index in (0, 0, 1):
        sender.send(receiver.address, act(index), (torch.tensor([index]),))
    assert receiver.wait(act(1), "0.0")[0].item() == 1
    assert receiver.held() == {act(0)}
    receiver.leave(set())
    assert receiver.wait(act(0), "0.0")[0].item() == 0
    assert receiver.held() == set()


def test_what_belongs_to_a_committed_step_is_dropped_also_when_it_comes_late(pair):
    sender, receiver = pair
    sender.send(receiver.address, act(0), (torch.tensor([1]),))
    sender.send(receiver.address, act(1), (torch.tensor([1]),))
    receiver.wait(act(1), "0.0")
    receiver.drop(1)
    sender.send(receiver.address, act(2), (torch.tensor([1]),))
    sender.send(receiver.address, act(3, step=2), (torch.tensor([7]),))
    assert receiver.wait(act(3, step=2), "0.0")[0].item() == 7
    receiver._session.wait_timeout_s = 0.05
    for index in (0, 2):
        with pytest.raises(WaitTimeout, match=rf"act of stage 0, micro-batch 0\.{index}, step 1 from seat 0.0"):
            receiver.wait(act(index), "0.0")


def test_the_coordinator_hears_what_does_not_come(pair, coordinator):
    pair[1]._session.wait_timeout_s = 0.05
    with pytest.raises(WaitTimeout, match="once more"):
        pair[1].wait(act(0), "0.0")
    assert Missing(1, 0, str(act(0)), "0.0") in coordinator.hear(Missing)


def test_what_was_sent_before_all_went_back_to_a_checkpoint_is_not_taken_for_what_comes_after(pair):
    sender, receiver = pair
    receiver.drop(4)
    receiver.rewind(2)
    sender.send(receiver.address, act(0, step=3), (torch.tensor([1]),))  # late, and of the first time
    sender.rewind(2)
    sender.send(receiver.address, act(1, step=3), (torch.tensor([2]),))
    assert receiver.wait(act(1, step=3), "0.0")[0].item() == 2
    assert receiver.held() == set()


def test_the_coordinator_hears_of_a_connection_that_broke_and_what_is_sent_after_meeting_again_arrives(pair, coordinator):
    sender, receiver = pair
    members = (Member(0, Seat(0, 0), sender.address, "h"), Member(1, Seat(0, 1), receiver.address, "h"))
    sender._session.adopt(Generation(3, members, 0, "start", 0.0))
    sender.send(receiver.address, act(0), (torch.tensor([1]),))
    receiver.wait(act(0), "0.0")
    sender._outboxes[receiver.address]._connection.shutdown(socket.SHUT_RDWR)
    sender.send(receiver.address, act(1), (torch.tensor([1]),))
    assert Missing(0, 3, "a connection", "0.1") in coordinator.hear(Missing)
    sender.leave({receiver.address})
    sender.send(receiver.address, act(1), (torch.tensor([7]),))
    assert receiver.wait(act(1), "0.0")[0].item() == 7


def test_a_membership_change_breaks_the_wait(pair, coordinator):
    coordinator.tell(generation(1, [0]))
    with pytest.raises(Interrupted):
        pair[1].wait(act(0), "0.0")


def test_sends_to_a_peer_that_is_gone_do_not_block(coordinator):
    alive, gone = (Transport(coordinator.session(rank)) for rank in (0, 1))
    address = gone.address
    gone.close()
    for index in range(50):
        alive.send(address, act(index), (torch.zeros(1 << 16),))
    alive.leave(set())
    alive.close()


def data(index: int) -> Datum:
    return Datum("data", 0, MicroBatch(0, index), 1)


def test_data_is_no_boundary_tensor_and_is_collected_by_its_kind(pair):
    sender, receiver = pair
    sender.send(receiver.address, data(0), (torch.tensor([5]),))
    sender.send(receiver.address, act(0), (torch.tensor([1]),))
    receiver.wait(act(0), "0.0")
    assert receiver.held() == set()
    assert {datum: tensors[0].item() for datum, tensors in receiver.collect("data").items()} == {data(0): 5}
    assert receiver.collect("data") == {}


def test_what_somebody_sent_before_it_went_is_heard_and_nothing_of_it_after(pair):
    sender, receiver = pair
    big = torch.zeros(1 << 20)
    for index in range(8):
        sender.send(receiver.address, act(index), (big,))
    sender.wait_sent([receiver.address])
    sender.leave(set())  # its connection ends, as that of a process that is killed
    receiver.hear_out({"tcp://somebody:else"})
    assert receiver.held() == {act(index) for index in range(8)}
    sender.send(receiver.address, act(9), (big,))
    sender.wait_sent([receiver.address])
    sender.leave(set())
    receiver.hear_out({"tcp://somebody:else"})
    assert receiver.held() == {act(index) for index in range(8)}


def test_who_waits_until_its_peer_has_taken_everything_hears_of_a_membership_change(pair, coordinator):
    sender, receiver = pair
    silent = socket.create_server(("127.0.0.1", 0))  # takes what its buffers hold, and reads nothing
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    sender.send(address, act(0), (torch.zeros(1 << 24),))
    coordinator.tell(generation(1, [0]))
    with silent, pytest.raises(Interrupted):
        sender.wait_sent([address])
