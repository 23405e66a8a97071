"""What links over Gloo, between processes, have to do: what every link has (tests/support/link_port.py), and messages
between two.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from recycle_plugin.runtime.collectives import gloo
from recycle_plugin.runtime.collectives.gloo import GlooLink, Rendezvous
from recycle_plugin.runtime.collectives.link import (
    AllReduce,
    AllToAll,
    Barrier,
    Receive,
    Send,
)
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.session import Session
from tests.support.coordinator import FakeCoordinator
from tests.support.link_port import *  # noqa: F403  tests
from tests.support.link_port import SHORT_S, failure_of, name_of, one_dies
from tests.support.members import DIED, LONG_S, Place, in_processes
from tests.support.secret import SECRET, way

HERE = "127.0.0.1"
PRELOADED = ["torch", "recycle_plugin.runtime.collectives.gloo"]


# --- implementations ---------------------------------------------------------------------------------


def gloo_link(session: Session, members: int, generation: int) -> GlooLink:
    meeting = Rendezvous(session, f"link{generation}", range(members))
    return GlooLink(generation, meeting, name_of(members), HERE, timedelta(seconds=LONG_S))


def enter_gloo(place: Place, port: int, coordinator: tuple[str, int]) -> None:
    session = Session(connect(way(coordinator), LONG_S), place.position, SECRET)
    place.made = lambda generation: gloo_link(session, place.members, generation)


def over_gloo(scenario: Callable, members: int) -> list[Any]:
    return in_processes(scenario, members, enter_gloo, PRELOADED, coordinated=True)


@pytest.fixture
def run() -> Callable[[Callable, int], list[Any]]:
    return over_gloo


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


def dies_before_it_sends(place: Place) -> Any:
    return one_dies(place, lambda: Receive(torch.ones(1), 2, 0))


def test_a_members_death_before_it_sends(run):
    assert run(dies_before_it_sends, 3) == [("Broken", 3.0, "Broken", False)] * 2 + [DIED]


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


def test_a_socket_of_another_library_that_was_opened_meanwhile_stays_open():
    """NCCL has some without a port."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        gloo._shut(ours, {1})
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
