"""Planted mistakes of ordering: each is found, named by both its places, and gives wrong numbers when copies are late.

Each mistake has its right version, with one line more, in which nothing is found.
"""

from __future__ import annotations

import re
import threading

import pytest
import torch

from tests.support.waiting import together

D = "standin"
N = 1000
SEEDS = range(10)


def a_pinned_copy(source, right):
    """A result is copied on a side stream that does not wait for what computes it."""
    side, host = torch.Stream(device=D), torch.zeros(N, pin_memory=True)
    computed = source * 2  # FIRST
    if right:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(computed, non_blocking=True)  # THEN
    side.synchronize()
    return host.clone()


def its_early_reader(source, right):
    """What arrives by a copy is computed with before the copy is over."""
    side, host = torch.Stream(device=D), torch.full((N,), 2.0, pin_memory=True)
    arrived = torch.zeros(N, device=D)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        arrived.copy_(host, non_blocking=True)  # FIRST
    if right:
        torch.accelerator.current_stream().wait_stream(side)
    result = arrived * source  # THEN
    torch.accelerator.synchronize()
    return result.cpu()


def a_pinned_buffer_written_by_the_host(source, right):
    """The host writes to a pinned buffer from which a copy still reads."""
    host, arrived = torch.full((N,), 2.0, pin_memory=True), torch.zeros(N, device=D)
    arrived.copy_(host, non_blocking=True)  # FIRST
    if right:
        torch.accelerator.current_stream().synchronize()
    host.fill_(7)  # THEN
    return (arrived * source).cpu()


def a_pinned_buffer_written_by_another_copy(source, right):
    """A pinned buffer is copied into on one stream while a copy on another reads from it."""
    one, other = torch.Stream(device=D), torch.Stream(device=D)
    host, arrived, later = torch.full((N,), 2.0, pin_memory=True), torch.zeros(N, device=D), source * 7
    torch.accelerator.synchronize()
    with one:
        arrived.copy_(host, non_blocking=True)  # FIRST
    if right:
        other.wait_stream(one)
    with other:
        host.copy_(later, non_blocking=True)  # THEN
    torch.accelerator.synchronize()
    return arrived.cpu()


def a_copys_target_read_by_the_host(source, right):
    """The host reads what a copy brings, before the copy's event."""
    host, event = torch.zeros(N, pin_memory=True), torch.Event(D)
    host.copy_(source * 2, non_blocking=True)  # FIRST
    event.record()
    if right:
        event.synchronize()
    return host + 0  # THEN


def a_block_freed_under_a_copy(source, right):
    """A tensor is freed, of which a side stream makes a copy."""
    side, host = torch.Stream(device=D), torch.zeros(N, pin_memory=True)
    computed = source * 2
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(computed, non_blocking=True)  # FIRST
    if right:
        computed.record_stream(side)
    del computed  # THEN
    side.synchronize()
    return host.clone()


def memory_of_another_stream(source, right):
    """A tensor is allocated on one stream, whose work before may still use the memory, and written to on another."""
    side, work = torch.Stream(device=D), source + 1  # the compute stream is at work
    made = torch.empty(N, device=D)  # FIRST
    if right:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        made.fill_(2)  # THEN
    torch.accelerator.synchronize()
    return made.cpu() * work.cpu() / 2


MISTAKES = {
    function.__name__: function
    for function in (
        a_pinned_copy,
        its_early_reader,
        a_pinned_buffer_written_by_the_host,
        a_pinned_buffer_written_by_another_copy,
        a_copys_target_read_by_the_host,
        a_block_freed_under_a_copy,
        memory_of_another_stream,
    )
}
COPIES = [name for name in MISTAKES if name not in ("a_pinned_copy", "memory_of_another_stream")]


def places(function) -> list[int]:
    """The lines of both accesses of a mistake."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    begin = function.__code__.co_firstlineno
    return [
        next(i for i in range(begin, len(lines)) if lines[i].endswith(f"# {mark}")) + 1 for mark in ("FIRST", "THEN")
    ]


@pytest.mark.parametrize("name", MISTAKES)
def test_is_found_and_both_its_places_are_named(standin, name):
    source = torch.ones(N, device=D)
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="standin: two accesses") as raised:
        MISTAKES[name](source, False)
        standin.check()
    text = str(raised.value)
    first, then = (re.search(rf"{mark}: .*? on .*?, from\n(?:    .*\n)*", text)[0] for mark in ("first", "then"))
    for line, said in zip(places(MISTAKES[name]), (first, then)):
        assert f"test_mistakes.py:{line} in {name}\n" in said, text


@pytest.mark.parametrize("name", MISTAKES)
def test_the_right_version_is_silent_and_right_at_all_moments(standin, name):
    for late in (None, *SEEDS):
        standin.configure(late=late)
        assert torch.equal(MISTAKES[name](torch.ones(N, device=D), True), torch.full((N,), 2.0))
        standin.check()


@pytest.mark.parametrize("name", COPIES)
def test_gives_wrong_numbers_when_copies_are_late(standin, name):
    wrong = 0
    for late in SEEDS:
        standin.configure(late=late, clocks=False)
        wrong += not torch.equal(MISTAKES[name](torch.ones(N, device=D), False), torch.full((N,), 2.0))
    assert wrong, "no seed's moments show it"


def test_the_same_seed_gives_the_same_moments(standin):
    runs = []
    for _ in range(2):
        wrong = []
        for late in SEEDS:
            standin.configure(late=late, clocks=False)
            found = its_early_reader(torch.ones(N, device=D), False)
            wrong.append(found.tolist())
        runs.append(wrong)
    assert runs[0] == runs[1] and len({tuple(each) for each in runs[0]}) == 2, "some early, and some late"


def test_parts_of_a_buffer_are_written_by_several_streams(standin):
    pool = torch.zeros(4, N, device=D)
    torch.accelerator.synchronize()
    for i in range(4):
        with torch.Stream(device=D):
            pool[i].fill_(i), pool[i, ::2].add_(0)
    columns = [torch.Stream(device=D) for _ in range(2)]
    torch.accelerator.synchronize()
    for i, stream in enumerate(columns):
        with stream:
            pool[:, i].fill_(9)
    with columns[0], pytest.raises(RuntimeError, match="two accesses of device memory are not ordered"):
        pool[:, :2].sum()
    torch.accelerator.synchronize()


def test_an_access_of_the_host_that_torch_does_not_see(standin):
    host, event = torch.zeros(N, pin_memory=True), torch.Event(D)
    host.copy_(torch.ones(N, device=D), non_blocking=True)
    event.record()
    for polled in (False, True):  # which orders nothing, as for torch.cuda._sanitizer
        with pytest.raises(RuntimeError, match="access of the host on the host .reads"):
            standin.host_access(host, write=False)
        assert polled or event.query()
    event.synchronize()
    standin.host_access(host[1:], write=True)


def test_what_cannot_be_raised_at_once_is_raised_by_the_next_call(standin):
    host = torch.zeros(N, pin_memory=True)
    host.copy_(torch.ones(N, device=D), non_blocking=True)
    thread = threading.Thread(target=lambda: host.add_(1))
    thread.start(), thread.join(10)
    with pytest.raises(RuntimeError, match="aten::add_ on the host .writes"):
        torch.ones(1, device=D)
    standin.check()
    host.sum()
    (left,) = standin.violations()
    assert "aten::sum on the host (reads)" in left and not standin.violations()


def test_pinned_memory_is_kept_for_the_copies_that_use_it(standin):
    for late in SEEDS:
        standin.configure(late=late)
        host, arrived = torch.full((N,), 2.0, pin_memory=True), torch.zeros(N, device=D)
        arrived.copy_(host, non_blocking=True)
        del host
        assert torch.full((N,), 7.0, pin_memory=True)[0] == 7 and arrived.sum().item() == 2 * N


def test_a_backward_passes_work_is_named_by_its_node(standin):
    side, a = torch.Stream(device=D), torch.ones(N, device=D, requires_grad=True)
    a.exp().sum().backward()
    side.wait_stream(torch.accelerator.current_stream())
    a.exp().sum().backward()  # accumulates in place
    with side, pytest.raises(RuntimeError, match=r"first: aten::add of torch::autograd::AccumulateGrad on "):
        a.grad.sum()
    torch.accelerator.synchronize()


def test_a_copy_that_torch_makes_pinned_goes_on_by_itself(standin):
    standin.configure(late=0)
    there = torch.ones(N, device=D).to("cpu", non_blocking=True)
    assert there.is_pinned() and not any("copy" in kind for kind, _ in standin.synchronisations())
    torch.accelerator.synchronize()
    assert there.sum() == N


def test_threads_compute_on_streams_of_their_own(standin):
    a = torch.arange(float(N), device=D)
    torch.accelerator.synchronize()

    def compute(_):
        with torch.Stream(device=D) as stream:
            for _ in range(100):
                b = (a * 2).relu_().cumsum(0)
            stream.synchronize()
            return b[-1].item()

    assert together(compute, range(4)) == [N * (N - 1)] * 4


def test_a_polled_event_comes(standin):
    waited = 0
    for late in SEEDS:
        standin.configure(late=late)
        host, event = torch.zeros(N, pin_memory=True), torch.Event(D)
        host.copy_(torch.ones(N, device=D), non_blocking=True)
        event.record()
        for _ in range(10):
            if event.query():
                break
            waited += 1
        event.synchronize()
        assert host.sum() == N
    standin.check()
    assert waited


def test_fresh_and_freed_memory_is_poisoned(standin):
    a = torch.empty(N, dtype=torch.bfloat16, device=D)
    assert a.isnan().all() and (torch.empty(3, dtype=torch.int64, device=D) == -1).all()
    assert torch.empty(3, pin_memory=True).isnan().all()


def test_synchronisations_are_counted_by_kind_and_place(standin):
    a, host = torch.ones(3, device=D), torch.zeros(3, pin_memory=True)
    standin.reset_synchronisations()
    a.item() if a.dim() == 0 else a.sum().item()
    a.cpu(), a.to("cpu"), a.copy_(torch.ones(3)), a.copy_(host), host.copy_(a)
    event = torch.Event(D)
    event.record(), event.synchronize(), torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize(), torch.nonzero(a), a[a > 0]
    host.copy_(a, non_blocking=True), a.add_(1).mul_(a).sum(), event.query(), event.synchronize()
    found = standin.synchronisations()
    kinds = {}
    for (kind, place), count in found.items():
        assert re.search(r"test_mistakes.py:\d+ test_synchronisations_are_counted", place), place
        kinds[kind] = kinds.get(kind, 0) + count
    assert kinds == {
        "item": 1,
        "copy of unpinned memory to the host": 2,
        "copy of unpinned memory from the host": 1,
        "copy from the host": 1,
        "copy to the host": 1,
        "event.synchronize": 1,
        "stream.synchronize": 1,
        "device synchronize": 1,
        "aten::nonzero": 2,
    }
