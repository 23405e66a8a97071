"""What every link has to do (recycle_plugin/runtime/collectives/link.py): over Gloo between processes, and between
threads of one.

Each test is a scenario that every member runs; what they return comes in the members' order, DIED for who has.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives import gloo
from recycle_plugin.runtime.collectives.gloo import GlooLink, Rendezvous
from recycle_plugin.runtime.collectives.link import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Broken,
    Gather,
    Handle,
    Receive,
    ReduceScatter,
    Send,
)
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.session import Session
from tests.support.coordinator import FakeCoordinator
from tests.support.members import DIED, LONG_S, Place, in_processes, told
from tests.support.secret import SECRET, way
from tests.support.threads_link import Meeting, ThreadsLink
from tests.support.waiting import together

HERE = "127.0.0.1"
SHORT_S = 0.2  # what must pass
PRELOADED = ["torch", "recycle_plugin.runtime.collectives.gloo"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SIZES = (0, 1, 1000, 1 << 18)


class Died(BaseException):
    """A thread that plays a member ends."""


# --- implementations ---------------------------------------------------------------------------------


def name_of(members: int) -> str:
    return f"ranks {', '.join(map(str, range(members)))}"


def gloo_link(session: Session, members: int, generation: int) -> GlooLink:
    meeting = Rendezvous(session, f"link{generation}", range(members))
    return GlooLink(generation, meeting, name_of(members), HERE, timedelta(seconds=LONG_S))


def enter_gloo(place: Place, port: int, coordinator: tuple[str, int]) -> None:
    session = Session(connect(way(coordinator), LONG_S), place.position, SECRET)
    place.made = lambda generation: gloo_link(session, place.members, generation)


def over_gloo(scenario: Callable, members: int) -> list[Any]:
    return in_processes(scenario, members, enter_gloo, PRELOADED, coordinated=True)


def between_threads(scenario: Callable, members: int) -> list[Any]:
    store, meetings, lock = dist.HashStore(), {}, threading.Lock()
    results: list[Any] = [DIED] * members

    def run(position: int) -> None:
        def made(generation: int) -> ThreadsLink:
            with lock:
                meeting = meetings.setdefault(generation, Meeting(members))
            return ThreadsLink(generation, meeting, position, name_of(members))

        def end() -> None:
            for meeting in meetings.values():
                with meeting.lock:
                    meeting.lose(position)
            raise Died

        with suppress(Died):
            results[position] = told(scenario, Place(position, members, store, end, made))

    together(run, range(members), 2 * LONG_S)
    return results


@pytest.fixture(params=[over_gloo, between_threads])
def run(request) -> Callable[[Callable, int], list[Any]]:
    return request.param


# --- operations --------------------------------------------------------------------------------------


def value(position: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any dtype."""
    return (torch.arange(size) % 5 + 2 * position + 1).to(dtype)


def failure_of(handle: Handle, timeout_s: float = LONG_S) -> str:
    """The type of what its wait raises."""
    try:
        handle.wait(timeout_s)
    except (Broken, RecycleError) as error:
        return type(error).__name__
    return "none"


def begun(
    place: Place, size: int, dtype: torch.dtype
) -> Iterator[tuple[str, Any, list[torch.Tensor], list[torch.Tensor] | None]]:
    """Every operation but those between two, with the tensors that it changes here, and what they have to become (None:
    not defined).
    """
    here, members = place.position, place.members
    each, wide = (
        [value(one, size, dtype) for one in range(members)],
        [value(one, members * size, dtype) for one in range(members)],
    )
    own, last, zeros = each[here], members - 1, lambda: torch.zeros(size, dtype=dtype)
    total, largest = torch.stack(each).sum(0).to(dtype), each[-1]

    def part(one: torch.Tensor) -> torch.Tensor:
        return one[here * size : (here + 1) * size]

    for name, op, expected in (("sum", ReduceOp.SUM, total), ("max", ReduceOp.MAX, largest)):
        held = own.clone()
        yield name, AllReduce([held], op), [held], [expected]
    held = own.clone()
    held = own.clone()
    yield "broadcast", Broadcast([held], last), [held], [each[last]]
    outputs = [zeros() for _ in each]
    yield "all-gather", AllGather(outputs, own), outputs, each
    outputs = [zeros() for _ in each] if here == last else []
    yield "gather", Gather(outputs, own, last), outputs, each if here == last else []
    held = zeros()
    yield (
        "reduce-scatter",
        ReduceScatter(held, wide[here], ReduceOp.SUM),
        [held],
        [part(torch.stack(wide).sum(0).to(dtype))],
    )
    held = torch.zeros(members * size, dtype=dtype)
    yield "all-to-all", AllToAll(held, wide[here], [], []), [held], [torch.cat([part(one) for one in wide])]
    yield "barrier", Barrier(), [], []


def all_in_turn(place: Place) -> list[str]:
    link, wrong = place.link(), []
    for dtype, size in itertools.product(DTYPES, SIZES):
        for name, operation, tensors, expected in begun(place, size, dtype):
            link.start(operation).wait(LONG_S)
            if expected is not None and not all(map(torch.equal, tensors, expected)):
                wrong.append(f"{name} of {size} {dtype}")
    return wrong


def all_at_once(place: Place) -> list[str]:
    """Of all sizes and dtypes, before the connections are there, and waited for from the last one on."""
    link, underway = place.link(), []
    for dtype, size in itertools.product(DTYPES, SIZES):
        underway += [
            (f"{name} of {size} {dtype}", link.start(operation), tensors, expected)
            for name, operation, tensors, expected in begun(place, size, dtype)
        ]
    for _, handle, _, _ in reversed(underway):
        handle.wait(LONG_S)
    return [
        name
        for name, _, tensors, expected in underway
        if expected is not None and not all(map(torch.equal, tensors, expected))
    ]


@pytest.mark.parametrize("scenario", [all_in_turn, all_at_once])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_each_operation_gives_what_it_says(run, scenario, members):
    assert run(scenario, members) == [[]] * members


def uneven(place: Place) -> list[float]:
    here, held = place.position, torch.zeros(3)
    lengths = [1, 2] if here == 0 else [2, 1]
    place.link().start(AllToAll(held, torch.arange(3.0) + 10 * here, lengths, lengths)).wait(LONG_S)
    return held.tolist()


def test_parts_of_different_lengths(run):
    assert run(uneven, 2) == [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]]


def swapped(place: Place) -> tuple[bool, list[list[float]]]:
    """More than the system's buffers hold, in both directions, and of two tags, which are received the other way
    round.
    """
    link, peer, size = place.link(), 1 - place.position, 1 << 20
    held = [torch.zeros(size), torch.zeros(1), torch.zeros(1)]
    sends = [
        link.start(Send(torch.full((length,), 10.0 * place.position + number), peer, tag))
        for number, (length, tag) in enumerate([(size, 0), (1, 1), (1, 1)])
    ]
    receives = [link.start(Receive(held[number], peer, tag)) for number, tag in ((1, 1), (2, 1), (0, 0))]
    for handle in (*receives, *sends):
        handle.wait(LONG_S)
    return (
        bool((held[0] == held[0][0]).all()),
        [held[number][0].item() for number in range(3)],
        {handle.source for handle in receives},
    )


def test_two_send_to_each_other(run):
    assert run(swapped, 2) == [(True, [10.0, 11.0, 12.0], {1}), (True, [0.0, 1.0, 2.0], {0})]


def from_anyone(place: Place) -> list[tuple[int, float]]:
    link, found = place.link(), []
    link.connect().wait(LONG_S)
    if place.position:
        link.start(Send(torch.full((1,), float(place.position)), 0, 3)).wait(LONG_S)
    for _ in range(0 if place.position else 2):
        held = torch.zeros(1)
        handle = link.start(Receive(held, None, 3))
        handle.wait(LONG_S)
        found.append((handle.source, held.item()))
    place.meet("the end")
    return sorted(found)


def test_who_receives_from_anyone_knows_from_whom(run):
    assert run(from_anyone, 3) == [[(1, 1.0), (2, 2.0)], [], []]


# --- handles -----------------------------------------------------------------------------------------


def one_waits_for_the_other(place: Place) -> tuple[bool, float, float]:
    """The first has started the sum before the second has made its link; the second starts it only when it has what the
    first sends after that.
    """
    if place.position == 0:
        link, total = place.link(), torch.ones(1)
        underway = link.start(AllReduce([total], ReduceOp.SUM))
        early = underway.poll()
        place.say("started")
        link.start(Send(torch.full((1,), 7.0), 1, 0)).wait(LONG_S)
        underway.wait(LONG_S)
        return early, total.item(), 7.0
    place.hear("started", 0)
    link, total, got = place.link(), torch.ones(1), torch.zeros(1)
    link.start(Receive(got, 0, 0)).wait(LONG_S)
    link.start(AllReduce([total], ReduceOp.SUM)).wait(LONG_S)
    return False, total.item(), got.item()


def test_nothing_blocks_but_a_wait(run):
    assert run(one_waits_for_the_other, 2) == [(False, 2.0, 7.0)] * 2


def two_in_flight(place: Place) -> tuple[list[bool], list[float], str]:
    """Both started before the other member starts either; the second is waited for first, with a deadline that passes
    first.
    """
    link, held = place.link(), [torch.ones(1), torch.full((1,), 10.0)]
    link.connect().wait(LONG_S)
    if place.position == 1:
        place.hear("started", 0)
    handles = [link.start(AllReduce([each], ReduceOp.SUM)) for each in held]
    told, said, early = [], "", [False, False]
    for handle in handles:
        handle.when_over(lambda: told.append(True))
    if place.position == 0:
        try:
            handles[1].wait(SHORT_S)
        except WaitTimeout as error:
            said = str(error)
        early = [handle.poll() for handle in handles]
        place.say("started")
    for handle in reversed(handles):
        handle.wait(LONG_S)
        assert handle.poll() and not handle.leave()
    handles[0].when_over(lambda: told.append(True))
    return early, [each.item() for each in held], said, len(told)


def test_two_in_flight_and_a_deadline_that_passes(run):
    """It names what was waited for, and the operation goes on."""
    first, second = run(two_in_flight, 2)
    assert first == ([False, False], [2.0, 20.0], f"waited {SHORT_S:g} s for AllReduce among ranks 0, 1", 3)
    assert second == ([False, False], [2.0, 20.0], "", 3)


def nobody_comes(place: Place) -> tuple[str, str, str, str] | None:
    if place.position == 2:
        place.hear("seen", 0, 1)
        return None
    link = place.link()
    underway, said = link.start(AllReduce([torch.ones(1)], ReduceOp.SUM)), []
    place.say("there")
    place.hear("there", 0, 1)
    for handle in (link.connect(), underway):
        try:
            handle.wait(1.0)
        except WaitTimeout as error:
            said.append(str(error))
    assert not link.connected
    link.abort()
    place.say("seen")
    return *said, failure_of(link.connect()), failure_of(underway), failure_of(link.start(Barrier()))


def test_a_member_that_never_comes_is_named_at_the_deadline(run):
    *two, nobody = run(nobody_comes, 3)
    assert nobody is None
    assert (
        two
        == [
            (
                "waited 1 s for the connections among ranks 0, 1, 2; not there of 3 are number 2",
                "waited 1 s for AllReduce among ranks 0, 1, 2",
                "Broken",
                "Broken",
                "Broken",
            )
        ]
        * 2
    )


def left_behind(place: Place) -> tuple | None:
    """Its memory is not given to anybody else, and the message that it takes is not the next one's."""
    link, size, peer = place.link(), 1 << 16, 1 - place.position
    link.connect().wait(LONG_S)
    if place.position == 1:
        place.hear("left", 0)
        for number in (1.0, 2.0):
            link.start(Send(torch.full((size,), number), peer, 0)).wait(LONG_S)
        total = torch.ones(1)
        link.start(AllReduce([total], ReduceOp.SUM)).wait(LONG_S)
        place.say("through")
        return total.item()
    kept, buffer = torch.full((1,), 5.0), torch.zeros(size)
    late, total, seen = link.start(Receive(buffer, peer, 0)), link.start(AllReduce([kept.clone()], ReduceOp.SUM)), []
    late.when_over(lambda: seen.append(True))
    assert late.leave() and total.leave() and not late.leave()
    del buffer
    others = [torch.full((size,), 3.0) for _ in range(64)]
    after = torch.zeros(size)
    taken = link.start(Receive(after, peer, 0))
    place.say("left")
    taken.wait(LONG_S)
    untouched = all(bool((other == 3.0).all()) for other in others)
    place.hear("through", 1)  # whose part of the sum this process still has to send
    return (
        after[0].item(),
        untouched,
        kept.item(),
        len(seen),
        late.poll(),
        failure_of(late, SHORT_S),
        failure_of(total, SHORT_S),
    )


def test_a_late_result_touches_nothing_that_is_used(run):
    """The others have theirs: who leaves an operation behind has taken part in it."""
    assert run(left_behind, 2) == [(2.0, True, 5.0, 1, False, "RecycleError", "RecycleError"), 6.0]


# --- failures ----------------------------------------------------------------------------------------


def one_dies(place: Place, operation: Callable[[], Any]) -> str | None:
    """Member 2, connected and through with one sum, in mid-operation of the others; who hears of it breaks what is
    left, which frees the rest.
    """
    link, first = place.link(), torch.ones(1)
    link.start(AllReduce([first], ReduceOp.SUM)).wait(LONG_S)
    place.meet("connected")
    if place.position == 2:
        place.hear("started", 0, 1)
        place.die()
    handle = link.start(operation())
    place.say("started")
    failed = failure_of(handle)
    link.abort()
    place.say("out")
    place.hear("out", 0, 1)
    again = place.link(2)
    return failed, first.item(), failure_of(link.start(Barrier())), again.connected


def dies_in_a_small_sum(place: Place) -> Any:
    return one_dies(place, lambda: AllReduce([torch.ones(1)], ReduceOp.SUM))


def dies_in_a_large_sum(place: Place) -> Any:
    return one_dies(place, lambda: AllReduce([torch.ones(1 << 20)], ReduceOp.SUM))


def dies_as_the_root(place: Place) -> Any:
    return one_dies(place, lambda: Broadcast([torch.ones(1)], 2))


def dies_in_an_all_to_all(place: Place) -> Any:
    return one_dies(place, lambda: AllToAll(torch.ones(3), torch.ones(3), [], []))


def dies_in_a_barrier(place: Place) -> Any:
    return one_dies(place, Barrier)


def dies_before_it_sends(place: Place) -> Any:
    return one_dies(place, lambda: Receive(torch.ones(1), 2, 0))


@pytest.mark.parametrize(
    "scenario",
    [
        dies_in_a_small_sum,
        dies_in_a_large_sum,
        dies_as_the_root,
        dies_in_an_all_to_all,
        dies_in_a_barrier,
        dies_before_it_sends,
    ],
)
def test_a_members_death_in_mid_operation(run, scenario):
    assert run(scenario, 3) == [("Broken", 3.0, "Broken", False)] * 2 + [DIED]


def aborted(place: Place) -> tuple[str, str]:
    """One member waits in a thread of its own for what the other never starts; that one only hears that the connections
    are broken.
    """
    link = place.link()
    link.connect().wait(LONG_S)
    if place.position == 1:
        held = link.start(Receive(torch.zeros(1), 0, 0))
        place.say("waits")
        failed = failure_of(held)
        place.meet("out")
        return failed, failed
    handles = [link.start(AllReduce([torch.zeros(1)], ReduceOp.SUM)), link.start(Receive(torch.zeros(1), 1, 5))]
    said: list[str] = []
    waiting = [
        threading.Thread(target=lambda handle=handle: said.append(failure_of(handle)), daemon=True)
        for handle in handles
    ]
    for thread in waiting:
        thread.start()
    place.hear("waits", 1)
    link.abort()
    link.abort()
    for thread in waiting:
        thread.join(LONG_S)
    place.meet("out")  # the end of a process breaks connections too
    return tuple(said)


def test_an_abort_frees_who_waits_in_another_thread_and_elsewhere(run):
    assert run(aborted, 2) == [("Broken", "Broken")] * 2


def two_generations(place: Place) -> tuple[float, str]:
    """The first one's second member comes only when the next one has long connected; the first is broken then, which
    the next does not feel.
    """
    first, second, total = place.link(1), place.link(2), torch.ones(1)
    early = first.connect() if place.position == 0 else None
    second.connect().wait(LONG_S)
    place.meet("connected")
    if place.position == 1:
        early = first.connect()
    early.wait(LONG_S)
    place.meet("both connected")
    stuck = first.start(Receive(torch.zeros(1), 1 - place.position, 0))
    place.meet("stuck")
    first.abort()
    failed = failure_of(stuck)
    place.meet("broken")
    second.start(AllReduce([total], ReduceOp.SUM)).wait(LONG_S)
    return total.item(), failed, first.generation, second.generation


def test_a_broken_generation_leaves_the_next_one_alone(run):
    assert run(two_generations, 2) == [(2.0, "Broken", 1, 2)] * 2


def aborted_while_connecting(place: Place) -> tuple[float, str]:
    """One member gives the first generation up before the other has come to it; that one comes yet, when the next has
    long connected.
    """
    first, second, total = place.link(1), place.link(2), torch.ones(1)
    if place.position == 0:
        late = first.start(Barrier())
    second.connect().wait(LONG_S)
    if place.position == 0:
        first.abort()
        place.say("aborted")
    else:
        place.hear("aborted", 0)
        late = first.start(Receive(torch.zeros(1), 0, 0))
    failed = failure_of(late)
    place.meet("failed")
    second.start(AllReduce([total], ReduceOp.SUM)).wait(LONG_S)
    return total.item(), failed


def test_who_gives_up_while_it_connects(run):
    assert run(aborted_while_connecting, 2) == [(2.0, "Broken")] * 2


def refused(place: Place) -> tuple[str, float]:
    link, total, complex_ones = place.link(), torch.ones(1), torch.ones(2, dtype=torch.complex64)
    try:
        link.start(AllToAll(complex_ones.clone(), complex_ones, [], [])).wait(LONG_S)
        said = "nothing"
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    link.start(AllReduce([total], ReduceOp.SUM)).wait(LONG_S)
    return said, total.item()


def test_what_gloo_can_not_do_is_no_broken_connection():
    assert over_gloo(refused, 2) == [("RuntimeError: Invalid scalar type", 2.0)] * 2


def test_who_begins_to_listen_while_gloo_does_can_be_reached_and_gloo_can_not(monkeypatch):
    """A thread of the script's, say."""
    others, options = [], gloo._options

    def slow(*given: Any) -> Any:
        others.append(socket.create_server((HERE, 0)))
        return options(*given)

    monkeypatch.setattr(gloo, "_options", slow)
    meeting = Rendezvous(FakeCoordinator().session(0), "link1", [0])
    link = GlooLink(1, meeting, "rank 0", HERE, timedelta(seconds=LONG_S))
    link.connect().wait(LONG_S)
    (other,), (own,) = others, meeting.ports_of_all()
    assert own != other.getsockname()[1]
    with other, socket.create_connection(other.getsockname(), LONG_S):
        pass
    with pytest.raises(TimeoutError):
        socket.create_connection((HERE, own), SHORT_S)
    link.abort()
