"""Boundary tensors over links of two (runtime/collectives/pairs.py) on the stand-in, over the false NCCL.

Both ends are in the test's process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from recycle_plugin.runtime.collectives import nccl, transports
from recycle_plugin.runtime.collectives.pairs import LinkedPairs
from recycle_plugin.runtime.devices.kinds import accelerator_at
from recycle_plugin.runtime.worker.tiers import OnDevice
from tests.mistakes.nccl import IN_TENSORS
from tests.support import mover_port as port
from tests.support.coordinator import FakeCoordinator
from tests.support.moved import Inbox, act
from tests.support.paired import two, ways
from tests.support.waiting import until


@contextmanager
def over_the_false_nccl() -> Iterator[tuple[list[LinkedPairs], OnDevice]]:
    """The movers of two neighbours, and what keeps the tensors that they send."""
    from tests.support import standin
    from tests.support.standin import nccl as false

    standin.configure(late=3)
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "60"
    nccl.dist.ProcessGroupNCCL = false.ProcessGroupNCCL
    made, thin = (partial(transports.over_nccl, make) for make in (nccl.process_group, nccl.thin_group))
    transports.LINKS[standin.NAME] = transports.Way(made, takes=nccl.takes, open_thin=thin)
    device, coordinator = accelerator_at(torch.device(standin.NAME, 0)), FakeCoordinator()
    with two(coordinator, transports.open_thin_link, device.lane, device) as ends:
        yield ends, OnDevice(device, logs=False)
    coordinator.close()


CONFORMING = (
    "test_order_of_arrival_does_not_matter_and_each_step_has_its_own_data",
    "test_what_has_arrived_is_handed_over_once_with_its_senders_era_also_when_that_is_gone",
    "test_sends_to_a_peer_that_is_gone_do_not_block",
    "test_what_somebody_sent_before_it_went_is_heard_and_nothing_of_it_after",
    "test_who_has_come_back_is_heard_before_this_worker_goes_on",
    "test_what_was_for_one_that_is_left_is_not_for_the_others",
    "test_what_is_closed_is_closed_once_more_without_harm",
)


@pytest.mark.parametrize("name", CONFORMING)
def test_it_does_what_every_mover_does(standin, name):
    with over_the_false_nccl() as (ends, tier):
        given = {"pair": ends, "on_host": lambda *tensors: tier.keep(tuple(each.to("standin") for each in tensors))}
        test = getattr(port, name)
        test(**{one: given[one] for one in test.__code__.co_varnames[: test.__code__.co_argcount]})


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int16, torch.bool)


def test_any_dtype_and_shape_and_gradients_of_any_layout(standin):
    with over_the_false_nccl() as ((sender, receiver), tier):
        inbox, number = Inbox(receiver), 0
        for dtype in DTYPES:
            for shape in ((2, 3, 4), (1,), (0, 5), ()):
                given = torch.randint(0, 2, shape, device="standin").to(dtype)
                for tensors in ((given,), (given, given, given)):
                    sender.send(receiver.address, act(number), tier.keep(tensors), 0)
                    came = inbox.wait(act(number))
                    number += 1
                    assert all(torch.equal(a.cpu(), b.cpu()) and a.dtype == dtype for a, b in zip(came, tensors))
        wide = torch.randn(4, 6, device="standin")
        grads = (wide.t(), wide[:, ::2], wide[:1].expand(3, 6))
        sender.send(receiver.address, act(number), tier.keep(grads), 0)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(inbox.wait(act(number)), grads, strict=True))
        sender.wait_sent([receiver.address])
        assert all(way.link.device._group.options.config.max_ctas == nccl.THIN_CTAS for way in ways(sender))
        assert (sender.by_link, sender.by_host) == (6 * len(DTYPES) + 1, 2 * len(DTYPES))


def test_what_has_come_is_computed_with_while_the_next_comes(standin):
    """Its memory is another order's, and is used again."""
    with over_the_false_nccl() as ((sender, receiver), tier):
        device, inbox, size = accelerator_at(torch.device("standin", 0)), Inbox(receiver), 1 << 12
        for number in range(20):
            given = torch.full((size,), float(number), device="standin")
            sender.send(receiver.address, act(number), tier.keep((given,)), 0)
        for number in range(20):
            (moved,) = device.from_host(inbox.wait(act(number)), "", shared=True).wait(60)
            del inbox.here[act(number)]
            assert (moved * 2).sum().item() == 2 * number * size
        until(lambda: sender.by_link == 20, "ends here")


def begun_after_an_abort() -> list[float]:
    """What is handed over where the sender has aborted before the receiver has begun its half."""
    with over_the_false_nccl() as ((sender, receiver), tier):
        begin, begun = receiver._begin_receiving, []
        (out, _), (_, comes) = ways(sender), ways(receiver)

        def late(*given):
            until(lambda: out.link.device._launched, "launch")
            sender.give_up_links()
            out.link.abort().wait(60)
            begin(*given)
            begun.append(given)

        receiver._begin_receiving = late
        sender.send(receiver.address, act(0), tier.keep((torch.ones(4, device="standin"),)), 0)
        until(lambda: begun and not comes.under_way, "end of the half")
        return [value for _, (tensor,), _ in receiver.arrivals() for value in tensor.cpu().tolist()]


def test_garbage_of_an_abort_is_not_handed_over(standin):
    assert begun_after_an_abort() == []


@pytest.mark.parametrize("mistake", IN_TENSORS)
def test_garbage_that_is_handed_over_would_be_seen(standin, mistake):
    IN_TENSORS[mistake]()
    assert begun_after_an_abort() != []
