"""What everything that moves tensors between workers does (runtime/movers/mover.py): they arrive under their own name,
whole, with their sender's era; what somebody lost has sent is heard, and nothing of it after.

Tests that ask for ``pair``, the movers of two workers, and ``on_host``, which keeps tensors as a worker does that sends
them.
"""

from __future__ import annotations

import pytest
import torch

from recycle_plugin.core.worker.executor import Interrupted
from tests.support.coordinator import generation
from tests.support.moved import Inbox, act


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_every_dtype_and_shape_travels_bit_for_bit(pair, dtype, on_host):
    sender, receiver = pair
    tensors = tuple(torch.randint(0, 2, shape).to(dtype) for shape in [(2, 3, 4), (1,), (0, 5), ()])
    sender.send(receiver.address, act(0), on_host(*tensors), 0)
    received = Inbox(receiver).wait(act(0))
    assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(received, tensors, strict=True))


def test_order_of_arrival_does_not_matter_and_each_step_has_its_own_data(pair, on_host):
    sender, receiver = pair
    for number in (12, 20, 10, 11):
        sender.send(receiver.address, act(number % 10, number // 10), on_host(torch.tensor([number])), 0)
    inbox = Inbox(receiver)
    assert [inbox.wait(act(n % 10, n // 10))[0].item() for n in (20, 10, 11, 12)] == [20, 10, 11, 12]


def test_what_has_arrived_is_handed_over_once_with_its_senders_era_also_when_that_is_gone(pair, on_host):
    sender, receiver = pair
    for index, valid_from in ((0, 3), (0, 3), (1, 4)):
        sender.send(receiver.address, act(index), on_host(torch.tensor([index])), valid_from)
    sender.wait_sent([receiver.address])
    sender.keep_only(set())
    receiver.hear_out(set())
    assert [(datum, valid_from) for datum, _, valid_from in receiver.arrivals()] == [
        (act(0), 3),
        (act(0), 3),
        (act(1), 4),
    ]
    assert not list(receiver.arrivals())


def test_a_membership_change_breaks_the_wait(pair, coordinator):
    coordinator.tell(generation(2, [0]))
    with pytest.raises(Interrupted):
        Inbox(pair[1]).wait(act(0))


def test_sends_to_a_peer_that_is_gone_do_not_block(pair, on_host):
    alive, gone = pair
    address = gone.address
    gone.close()
    for index in range(50):
        alive.send(address, act(index), on_host(torch.zeros(1 << 16)), 0)
    alive.keep_only(set())


def test_what_somebody_sent_before_it_went_is_heard_and_nothing_of_it_after(pair, on_host):
    sender, receiver = pair
    big = torch.zeros(1 << 20)
    for index in range(8):
        sender.send(receiver.address, act(index), on_host(big), 0)
    sender.wait_sent([receiver.address])
    sender.keep_only(set())  # its connection ends, as that of a process that is killed
    receiver.hear_out({"somebody://else"})
    inbox = Inbox(receiver)
    assert inbox.take().keys() == {act(index) for index in range(8)}
    sender.send(receiver.address, act(9), on_host(big), 0)
    sender.wait_sent([receiver.address])
    sender.keep_only(set())
    receiver.hear_out({"somebody://else"})
    assert inbox.take().keys() == {act(index) for index in range(8)}


def test_who_has_come_back_is_heard_before_this_worker_goes_on(pair, on_host):
    sender, receiver = pair
    receiver.hear_out({"somebody://else"})
    receiver.listen_to({sender.address})
    sender.send(receiver.address, act(0), on_host(torch.tensor([1])), 0)
    assert Inbox(receiver).wait(act(0))[0].item() == 1


def test_what_was_for_one_that_is_left_is_not_for_the_others(pair, on_host):
    sender, receiver = pair
    sender.send("tcp://127.0.0.1:1", act(0), on_host(torch.tensor([1])), 0)
    sender.send(receiver.address, act(1), on_host(torch.tensor([2])), 0)
    sender.keep_only({receiver.address})
    inbox = Inbox(receiver)
    assert inbox.wait(act(1))[0].item() == 2 and inbox.take().keys() == {act(1)}


def test_what_is_closed_is_closed_once_more_without_harm(pair):
    for _ in range(2):
        pair[0].close()
