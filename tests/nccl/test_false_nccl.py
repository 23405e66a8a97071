"""The false NCCL does what NCCL did with several processes on one H200, where one of them was killed."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.members import DIED, LONG_S, Place, in_processes
from tests.support.waiting import until

SIZE = 1 << 12
CALL_S = 1.0  # how long a call may block


def enter(place: Place, port: int, coordinator: None) -> None:
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(LONG_S)
    from tests.support import standin
    from tests.support.standin import nccl

    standin.configure(late=3)
    torch.set_default_device(standin.NAME)

    def made(prefix: str, rank: int | None = None, size: int | None = None, blocking: int = 0) -> Any:
        options = nccl.ProcessGroupNCCL.Options()
        options.config.blocking = blocking
        store = dist.PrefixStore(prefix, place.store)
        return nccl.ProcessGroupNCCL(store, place.position if rank is None else rank, size or place.members, options)

    place.made = made


def run(scenario, members: int) -> list[Any]:
    return in_processes(scenario, members, enter, ["torch", "torch._dynamo"])


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((SIZE,), value, device="standin")


def added(group: Any, value: float) -> float:
    total = ones(value)
    group.allreduce([total]).wait()
    torch.accelerator.synchronize()
    assert (total == total[0]).all()
    return total[0].item()


def on_a_side_stream() -> torch.Event:
    with torch.Stream(device="standin") as side:
        made = torch.ones(8, 8)
        assert (made @ made).shape == (8, 8)
        return side.record_event()


def happens(event: torch.Event) -> bool:
    return bool(until(event.query, "event"))


def aborted(groups: list[Any]) -> None:
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


# --- what was measured -------------------------------------------------------------------------------


def one_is_killed(place: Place) -> dict:
    """It dies before the others start a sum."""
    kept, group = torch.arange(SIZE), place.made("g0")
    first = added(group, place.position + 1.0)
    place.meet("summed")
    if place.position == 2:
        place.die()
    place.hear("lost", 2)
    total = ones()
    work = group.allreduce([total])
    computes, room = happens(on_a_side_stream()), torch.empty(1 << 20)
    stuck = not work.is_completed()
    place.say("looked")
    place.hear("looked", 0, 1)  # an abort ends the other one's kernel too
    aborted([group])
    torch.accelerator.synchronize()
    garbage = work.is_completed() and bool(total.isnan().all())
    again = added(place.made("g1", size=2), place.position + 1.0)
    intact = torch.equal(kept, torch.arange(SIZE)) and room.numel() == 1 << 20
    return {"first": first, "beside": computes, "stuck": stuck, "garbage": garbage, "again": again, "intact": intact}


def test_survivors_compute_beside_a_stuck_sum_and_make_a_new_group_after_its_abort():
    found = {"first": 6.0, "beside": True, "stuck": True, "garbage": True, "again": 3.0, "intact": True}
    assert run(one_is_killed, 3) == [found, found, DIED]


def pass_on(group: Any, rank: int, value: float) -> float:
    """From the first of a pair to the second, and back."""
    tensor, got = ones(value), ones(0.0)
    steps = [lambda: group.send([tensor], 1), lambda: group.recv([got], 1)]
    if rank:
        steps = [lambda: group.recv([got], 0), lambda: group.send([tensor], 0)]
    for step in steps:
        step().wait()
    return got[0].item()  # waits for its stream alone: the device may be stuck


def some_work_on(place: Place) -> dict:
    """A group of all and one for each pair; what has the dead in it is aborted."""
    here, everybody, pairs = place.position, place.made("all"), {}
    added(everybody, 1.0)
    for low in range(4):
        for high in range(low + 1, 4):
            if here in (low, high):
                pairs[low + high - here] = place.made(f"pair {low} {high}", int(here == high), 2)
                pass_on(pairs[low + high - here], int(here == high), float(here))
    place.meet("paired")
    if here == 3:
        place.die()
    place.hear("lost", 3)
    stuck = pairs[3].recv([ones(0.0)], 1), everybody.allreduce([ones()])
    live = pass_on(pairs[1 - here], here, 7.0 + here) if here < 2 else None
    were = [not work.is_completed() for work in stuck]
    place.say("looked")
    place.hear("looked", 0, 1, 2)  # an abort ends the others' kernels too
    aborted([pairs[3], everybody])
    after = pass_on(pairs[1 - here], here, 9.0 + here) if here < 2 else None
    return {"stuck": were, "live": live, "after": after}


def test_pairs_of_the_living_work_on_while_and_after_what_has_the_dead_in_it_is_aborted():
    """While: the H200 has not shown it; streams are independent."""
    *living, dead = run(some_work_on, 4)
    assert living == [
        {"stuck": [True, True], "live": 8.0, "after": 10.0},
        {"stuck": [True, True], "live": 7.0, "after": 9.0},
        {"stuck": [True, True], "live": None, "after": None},
    ]
    assert dead == DIED


def several_are_aborted(place: Place) -> list[int] | None:
    """Groups whose other member lives and does not come; returns how many of each lot were over."""
    over = []
    for number, at_once in ((1, True), (1, False), (4, True), (4, False)):
        groups = [place.made(f"{number} {at_once} {each}") for each in range(number)]
        for group in groups:
            added(group, 1.0)
        place.meet(f"{number} {at_once}")
        if place.position == 1:
            continue
        for group in groups:
            group.allreduce([ones()])
        done: list[Any] = []
        if at_once:
            aborted(groups)
            done = groups
        else:
            one_by_one = threading.Thread(target=lambda: [done.append(g.abort()) for g in groups], daemon=True)
            one_by_one.start()
            one_by_one.join(LONG_S if number == 1 else CALL_S)
        over.append(len(done))
        if len(done) < number:  # the second one on its way frees the first
            aborted(groups[1:])
    place.meet("over")
    return over


def test_groups_aborted_one_after_the_other_never_end_and_at_once_they_do():
    assert run(several_are_aborted, 2) == [[1, 1, 4, 0], []]


def a_direction_is_new(place: Place) -> str | bool:
    """A pair has sent one way only, another one both ways, before the peer dies."""
    here, one, both = place.position, place.made("one"), place.made("both")
    (one.recv([ones()], 0) if here else one.send([ones()], 1)).wait()
    pass_on(both, here, 1.0)
    place.meet("used")
    if here == 1:
        place.die()
    place.hear("lost", 1)
    stuck = both.recv([ones()], 1)
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(CALL_S)
    try:
        one.recv([ones()], 1)
    except dist.DistBackendError as error:
        return f"{stuck.is_completed()}, {error}"
    return "the call has returned"


def test_a_call_blocks_whose_direction_is_new_and_whose_peer_is_dead():
    assert run(a_direction_is_new, 2) == ["False, NCCL timeout in: the first use of a direction to rank 1", DIED]


def something_is_new(place: Place) -> list[bool]:
    """A kernel that has run before, and one that has not, beside a stuck sum."""
    from tests.support.standin.device import extension

    group = place.made("g0")
    added(group, 1.0)
    ones() + 1
    extension.load_lazily(True)
    (ones() + 1).sum().item()
    place.meet("summed")
    if place.position == 1:
        place.die()
    place.hear("lost", 1)
    group.allreduce([ones()])
    known = ones() + 1
    new = threading.Thread(target=known.cos, daemon=True)
    new.start()
    new.join(CALL_S)
    hangs = new.is_alive()
    aborted([group])
    new.join(LONG_S)
    return [known.numel() == SIZE, hangs, not new.is_alive()]


def test_a_kernel_that_is_loaded_beside_a_stuck_one_waits_for_its_end():
    assert run(something_is_new, 2) == [[True, True, True], DIED]


# --- what is known from sources ----------------------------------------------------------------------


def a_send_is_not_received(place: Place) -> list[bool]:
    group = place.made("g0")
    pass_on(group, place.position, 1.0)
    if place.position:
        place.hear("looked", 0)
        got = torch.zeros(1)
        group.recv([got], 0).wait()
        return [got.item()]
    work = group.send([torch.ones(1)], 1)
    early = work.is_completed()
    place.say("looked")
    return [early, bool(until(work.is_completed, "end of the send"))]


def test_a_send_ends_only_when_it_is_received():
    assert run(a_send_is_not_received, 2) == [[False, True], [1.0]]


def one_is_aborted(place: Place) -> list[bool]:
    """The last member dies, and the first is aborted; the second is not, and its sum ends all the same."""
    group, total = place.made("g0"), ones()
    added(group, 1.0)
    place.meet("summed")
    if place.position == 2:
        place.die()
    place.hear("lost", 2)
    work = group.allreduce([total])
    place.say("launched")
    place.hear("launched", 0, 1)
    if place.position == 0:
        aborted([group])
        place.hear("seen", 1)
        return []
    until(work.is_completed, "end of the sum")
    place.say("seen")
    torch.accelerator.synchronize()
    return [group.aborted, bool(total.isnan().all())]


def test_garbage_of_an_abort_ends_the_kernels_of_others():
    assert run(one_is_aborted, 3) == [[], [False, True], DIED]


def a_queue_is_full(place: Place) -> list[object]:
    """With room for two kernels a third call blocks until the abort, which it hears of."""
    from tests.support.standin import nccl

    group, said = place.made("g0"), []
    added(group, 1.0)
    place.meet("summed")
    if place.position:
        place.hear("over", 0)
        return []
    nccl.LAUNCHES = 2

    def calls() -> None:
        try:
            for number in range(3):
                said.append(number)
                group.allreduce([ones()])
        except dist.DistBackendError as error:
            said.append(str(error))

    calling = threading.Thread(target=calls, daemon=True)
    calling.start()
    until(lambda: said == [0, 1, 2], "third call")
    aborted([group])
    calling.join(LONG_S)
    place.say("over")
    return said


def test_a_launch_blocks_once_the_queue_is_full():
    words = "NCCL communicator was aborted on rank 0, in room in the queue for allreduce"
    assert run(a_queue_is_full, 2) == [[0, 1, 2, words], []]


@pytest.mark.parametrize("early", [False, True])
def test_what_is_launched_behind_a_sum_reads_garbage_until_the_sum_is_over(early):
    assert run(read_early if early else read_late, 2)[0] == [early, 2.0]


def read_early(place: Place, early: bool = True) -> list[object]:
    """The second member begins the second sum only once the first one has read."""
    group, total = place.made("g0"), ones()
    added(group, 1.0)
    if early and place.position == 1:
        place.hear("read", 0)
    work = group.allreduce([total])
    if not early:
        until(work.is_completed, "end of the sum")
    work.wait()
    behind = total + 0
    if early and place.position == 0:
        place.say("read")
    torch.accelerator.synchronize()
    return [bool(behind.isnan().all()), total[0].item()]


def read_late(place: Place) -> list[object]:
    return read_early(place, early=False)


def a_queue_is_shared(place: Place) -> list[bool]:
    """The first sends, and so does the second; each begins to receive only once its own send stands in the queue."""
    from tests.support.standin.device import extension

    groups = [place.made("there"), place.made("back")]
    for group in groups:
        pass_on(group, place.position, 1.0)
    place.meet("used")
    extension.share_queues(1)
    there, back = groups if place.position == 0 else groups[::-1]
    sent = there.send([ones()], 1 - place.position)
    place.meet("sent")
    received = back.recv([ones()], 1 - place.position)
    beside = on_a_side_stream()
    place.meet("begun")
    stuck = [not (each.is_completed() if each is not beside else each.query()) for each in (sent, received, beside)]
    place.meet("looked")
    aborted([there])
    return [*stuck, bool(until(received.is_completed, "end of what was behind the send")), happens(beside)]


def test_a_stuck_kernel_holds_up_what_stands_behind_it_in_a_queue():
    assert run(a_queue_is_shared, 2) == [[True] * 5] * 2


def a_stream_is_shared(place: Place) -> list[bool]:
    """The second group's stream is the first one's: torch has no more."""
    first = place.made("first")
    added(first, 1.0)
    for _ in range(31):
        torch.Stream(device="standin")
    second = place.made("second")
    added(second, 1.0)
    place.meet("summed")
    if place.position:
        place.hear("looked", 0)
        added(first, 1.0)
        added(second, 1.0)
        return []
    works = [group.allreduce([ones()]) for group in (first, second)]
    stuck = [work.is_completed() for work in works]
    place.say("looked")
    until(works[1].is_completed, "end of both")
    return [first._communicators[None].stream == second._communicators[None].stream, *stuck, works[0].is_completed()]


def test_torch_gives_the_33rd_stream_to_two():
    assert run(a_stream_is_shared, 2) == [[True, False, False, True], []]
