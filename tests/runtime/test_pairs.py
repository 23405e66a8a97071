"""The mover of boundary tensors over links of two (runtime/collectives/pairs.py), over links that the test rules.

What every mover does is in test_mover.py; tests/standin/test_pairs.py has it over the false NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from recycle_plugin.core.messages.from_workers import Missing, Note
from recycle_plugin.core.vocabulary.ids import Seat
from recycle_plugin.core.vocabulary.roster import Member, Roster
from recycle_plugin.errors import RecycleError, WaitTimeout
from recycle_plugin.runtime.collectives import pairs
from recycle_plugin.runtime.collectives.link import Handle
from recycle_plugin.runtime.collectives.neighbours import MOST_ENDS, wanted
from recycle_plugin.runtime.collectives.pairs import LinkedPairs
from recycle_plugin.runtime.devices.host import There
from recycle_plugin.runtime.devices.kept import Kept
from recycle_plugin.runtime.movers.outbox import Word
from recycle_plugin.runtime.movers.wire import Apart, shapes_of
from tests.mistakes.pairs import IN_PAIRS
from tests.support import waiting
from tests.support.moved import Inbox, act
from tests.support.paired import adopt, kept, two, ways
from tests.support.thread_links import Links
from tests.support.waiting import until

OUT = (0, 1)  # the ranks of the link on which the first sends


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture
def ends(coordinator, links, request, monkeypatch) -> Iterator[list[LinkedPairs]]:
    if "takes_too_long" in request.node.name:
        monkeypatch.setattr(pairs, "STUCK_S", 0.1)
        monkeypatch.setattr(pairs, "LOOK_S", 0.05)
    with two(coordinator, links.open) as made:
        yield made


def send(sender: LinkedPairs, receiver: LinkedPairs, *numbers: int) -> None:
    for number in numbers:
        sender.send(receiver.address, act(number), kept(torch.tensor([float(number)])), 0)


def counts(end: LinkedPairs) -> tuple[int, int]:
    return end.by_link, end.by_host


def complaints(coordinator) -> list[Missing]:
    with coordinator.news:
        return [message for message in coordinator.heard if isinstance(message, Missing)]


def test_what_is_on_the_accelerator_goes_over_the_link_in_any_dtype_and_shape(ends):
    sender, receiver = ends
    given = (
        torch.randn(2, 3, 4),
        torch.zeros(0, 5),
        torch.tensor(7),
        torch.randn(3).to(torch.complex64),
        torch.arange(3, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.arange(4.0)[1::2][:1],  # a number with a stride
    )
    sender.send(receiver.address, act(0), kept(*given), 3)
    sender.wait_sent([receiver.address])
    inbox = Inbox(receiver)
    came = inbox.wait(act(0))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(came, given, strict=True))
    assert counts(sender) == (1, 0)


def test_what_is_in_host_memory_or_has_no_elements_goes_by_the_host(ends):
    sender, receiver = ends
    sender.send(receiver.address, act(0), There((torch.ones(1),)), 0)
    sender.send(receiver.address, act(1), kept(torch.ones(0)), 0)
    inbox = Inbox(receiver)
    assert inbox.wait(act(0))[0].item() == 1 and inbox.wait(act(1))[0].numel() == 0
    assert counts(sender) == (0, 1)


def test_before_a_link_stands_all_goes_by_the_host(coordinator, links, monkeypatch):
    may = threading.Event()
    monkeypatch.setattr(LinkedPairs, "_connect", lambda self, made: may.wait(30) and connect(self, made))
    with two(coordinator, links.open, stand=False) as (sender, receiver):
        send(sender, receiver, 0)
        assert Inbox(receiver).wait(act(0))[0].item() == 0 and counts(sender) == (0, 1)
        may.set()
        until(lambda: ways(sender)[0].stands, "link")
        send(sender, receiver, 1)
        assert Inbox(receiver).wait(act(1))[0].item() == 1 and counts(sender) == (1, 1)


connect = LinkedPairs._connect


def test_a_link_that_is_not_made_in_time_is_over_on_both_sides(coordinator, links, monkeypatch):
    monkeypatch.setattr(pairs, "CONNECT_S", 0.1)
    monkeypatch.setattr(LinkedPairs, "_connect", lambda self, made: self._session.rank == 0 and connect(self, made))
    with two(coordinator, links.open, stand=False) as (sender, receiver):
        until(lambda: all(way.over for end in (sender, receiver) for way in ways(end)), "ends of both links")
        send(sender, receiver, 0)
        assert Inbox(receiver).wait(act(0))[0].item() == 0 and counts(sender) == (0, 1)


# --- failures ----------------------------------------------------------------------------------------


def all_came(receiver: LinkedPairs, numbers: range) -> None:
    inbox = Inbox(receiver)
    assert [inbox.wait(act(number))[0].item() for number in numbers] == [*numbers]


def a_launch_fails(ends, links) -> None:
    """The third of five; the two before it are under way."""
    sender, receiver = ends
    links.held = True
    links.fails.add((OUT, 0, 2))
    send(sender, receiver, 0, 1)
    until(lambda: len(links.end(OUT, 1).begun) == 2, "halves of both")
    send(sender, receiver, 2, 3, 4)
    links.let()
    all_came(receiver, range(5))
    until(lambda: ways(receiver)[1].over and ways(receiver)[1].link.end, "end of the receiver's half")
    assert counts(sender) == (0, 5) and not any(way.under_way for way in ways(sender))
    assert len(links.end(OUT, 1).begun) == len(links.end(OUT, 0).begun) == 2, "a half that waits for nobody"


def the_first_launch_fails(ends, links) -> None:
    sender, receiver = ends
    links.fails.add((OUT, 0, 0))
    send(sender, receiver, 0, 1)
    all_came(receiver, range(2))
    until(lambda: ways(receiver)[1].over, "end of the receiver's half")
    assert len(links.end(OUT, 1).begun) == 0, "a half that waits for nobody"


def the_receivers_launch_fails(ends, links) -> None:
    sender, receiver = ends
    links.fails.add((OUT, 1, 1))
    send(sender, receiver, 0, 1)
    all_came(receiver, range(2))
    until(lambda: ways(sender)[0].over, "end of the sender's half")
    send(sender, receiver, 2)
    all_came(receiver, range(2, 3))
    assert counts(sender) == (1, 2)


def the_numbers_do_not_fit(ends, links) -> None:
    """As if the receiver had missed one: what comes is not taken for another one."""
    sender, receiver = ends
    links.held = True
    sender.send(receiver.address, act(0), kept(torch.tensor([0.0])), 0)
    until(lambda: len(links.end(OUT, 1).begun) == 1, "half")
    way = ways(sender)[0]
    way.begun += 1
    send(sender, receiver, 1)
    links.let()
    all_came(receiver, range(2))
    until(lambda: way.over, "end of the sender's half")


FAILURES = [a_launch_fails, the_first_launch_fails, the_receivers_launch_fails, the_numbers_do_not_fit]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_link_that_fails_is_over_on_both_sides_and_what_it_has_not_brought_goes_by_the_host(
    ends, links, failure, coordinator
):
    failure(ends, links)
    assert all(way.stands for way in (ways(ends[0])[1], ways(ends[1])[0])), "the other direction"
    assert not complaints(coordinator)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: misaligned address")])
def test_a_device_that_takes_nothing_gets_it_by_the_host_and_blames_nobody(ends, coordinator, monkeypatch, error):
    sender, receiver = ends

    def full(*given, **more):
        raise error

    monkeypatch.setattr(LinkedPairs, "_places_for", full)
    send(sender, receiver, 0, 1)
    all_came(receiver, range(2))
    until(lambda: ways(sender)[0].over, "end of the sender's half")
    assert counts(sender) == (0, 2) and not complaints(coordinator)
    assert not any(isinstance(message, Note) for message in coordinator.heard)


def test_shapes_that_cannot_be_are_a_strangers(ends, coordinator):
    """Its connection ends, with a warning."""
    way = ways(ends[0])[0]
    ends[0]._outbox(way).send(Word(Apart(act(0), 0, (("float32", (-1,)),), 1, 0)))
    (note,) = coordinator.hear(Note)
    assert "tensors of shapes" in note.text


def test_what_neither_way_has_brought_the_coordinator_hears_of(ends, links, coordinator, monkeypatch):
    """The sender has seen the end of it, and the receiver has not."""
    monkeypatch.setattr(pairs, "LOST_S", 0.05)
    sender, receiver = ends
    links.end(OUT, 1).deaf = True
    send(sender, receiver, 0)
    until(lambda: counts(sender) == (1, 0), "end here")
    receiver._fail(ways(receiver)[1])
    (missing,) = coordinator.hear(Missing)
    assert (missing.rank, missing.generation, missing.source) == (1, 1, "0.0")


@pytest.mark.parametrize("how", ["it has come by the host", "of a generation that is over"])
def test_nobody_complains_without_need(ends, links, coordinator, monkeypatch, how):
    said = threading.Event()
    complain = LinkedPairs._complain
    monkeypatch.setattr(pairs, "LOST_S", 0.05)

    def slowly(self, way, datum):
        assert may.wait(30)
        complain(self, way, datum)
        said.set()

    may = threading.Event()
    monkeypatch.setattr(LinkedPairs, "_complain", slowly)
    sender, receiver = ends
    links.end(OUT, 1).deaf = True
    send(sender, receiver, 0)
    until(lambda: counts(sender) == (1, 0), "end here")
    receiver._fail(ways(receiver)[1])
    if how == "it has come by the host":
        sender.send(receiver.address, act(0), There((torch.ones(1),)), 0)
        Inbox(receiver).wait(act(0))
    else:
        adopt(ends, 2)
    may.set()
    assert said.wait(30) and not complaints(coordinator)


def test_a_copy_that_fails_where_a_link_has_is_an_error_of_the_sender(ends, links):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access")

    sender, receiver = ends
    links.fails.add((OUT, 0, 0))
    sender.send(receiver.address, act(0), Kept((torch.ones(1),), broken), 0)
    with pytest.raises(RecycleError, match=r"could not be sent: CUDA error"):
        sender.wait_sent([receiver.address])


@pytest.mark.parametrize("held_up", ["both", "the sender, which has not launched"])
def test_what_takes_too_long_goes_by_the_host_and_the_user_hears_of_it(ends, links, coordinator, held_up):
    """As two kernels in one queue of the hardware do."""
    sender, receiver = ends
    links.held = True
    if held_up != "both":
        link = links.end(OUT, 0)
        link.start = lambda operation, launched: link.begun.append((operation, handle := Handle("it"))) or handle
    send(sender, receiver, 0, 1)
    all_came(receiver, range(2))
    assert not ways(sender)[0].stands and counts(sender) == (0, 2)
    (note,) = {note.text for note in coordinator.heard if isinstance(note, Note)}
    assert note.startswith("the link for boundary tensors from rank 0 to rank 1 is given up: an operation was not over")
    assert not complaints(coordinator)


# --- membership changes ------------------------------------------------------------------------------


def test_at_the_word_of_a_loss_all_ends_and_nothing_of_it_is_sent_again(ends, links, coordinator):
    sender, receiver = ends
    links.held = True
    send(sender, receiver, 0, 1)
    until(lambda: len(links.end(OUT, 1).begun) == 2, "halves of both")
    for end in ends:
        end.give_up_links()
    sender.wait_sent([receiver.address])
    assert receiver.hear_out({receiver.address})
    assert not [*receiver.arrivals()] and counts(sender) == (0, 0) and not complaints(coordinator)
    send(sender, receiver, 2)
    assert counts(sender) == (0, 1), "until the next membership by the host"
    adopt(ends, 2)
    until(lambda: all(way.stands for end in ends for way in ways(end)), "links")
    links.let()
    receiver.listen_to({sender.address})
    send(sender, receiver, 3)
    assert Inbox(receiver).wait(act(3))[0].item() == 3 and counts(sender) == (1, 1)


def test_one_that_hears_of_a_loss_late_gets_what_was_under_way_by_the_host(ends, links):
    """Its half fails, and it does not know why."""
    sender, receiver = ends
    links.held = True
    send(sender, receiver, 0)
    until(lambda: len(links.end(OUT, 1).begun) == 1, "half")
    receiver.give_up_links()
    links.end(OUT, 0).abort()  # as a link does whose other end has gone
    assert Inbox(receiver).wait(act(0))[0].item() == 0


def test_where_the_next_change_has_come_meanwhile_no_links_are_made(ends):
    for end in ends:
        end.cut()
        end.give_up_links()
        end.go_on()
    assert all(way.left and not way.link.connected for end in ends for way in ways(end))


def test_what_was_announced_in_a_membership_that_is_over_is_dropped(ends, links):
    sender, receiver = ends
    adopt(ends, 2)
    until(lambda: all(way.stands for end in ends for way in ways(end)), "links")
    tensors = (torch.ones(1),)
    sender._outbox(ways(sender)[0]).send(Word(Apart(act(0), 0, shapes_of(tensors), 1, 0)))
    send(sender, receiver, 1)
    assert Inbox(receiver).wait(act(1))[0].item() == 1
    assert len(links.end(OUT, 1, 2).begun) == 1 and not ways(receiver)[1].over


def test_a_close_waits_for_what_is_under_way(ends, links):
    sender, receiver = ends
    links.held = True
    send(sender, receiver, 0)
    until(lambda: len(links.end(OUT, 1).begun) == 1, "half")
    changed, waited = sender._session.waiting.changed, threading.Event()
    wait_for = changed.wait_for
    changed.wait_for = lambda *given: waited.set() or wait_for(*given)
    closing = threading.Thread(target=sender.close, daemon=True)
    closing.start()
    assert waited.wait(30)
    links.let()
    assert Inbox(receiver).wait(act(0))[0].item() == 0
    closing.join(30)
    assert not closing.is_alive()


# --- which pairs -------------------------------------------------------------------------------------


def roster(replicas: int, stages: int, *lost: str) -> Roster:
    seats = [Seat(replica, stage) for stage in range(stages) for replica in range(replicas)]
    return Roster(
        tuple(
            Member(rank, seat, f"tcp://h:{rank + 1}", "h") for rank, seat in enumerate(seats) if str(seat) not in lost
        )
    )


def seats_of(found) -> list[str]:
    return [f"{one.seat}>{other.seat}" for one, other in found]


def test_with_all_there_each_replica_has_its_own():
    assert seats_of(wanted(roster(2, 3))) == [
        *("0.0>0.1", "1.0>1.1", "0.1>0.0", "0.1>0.2", "1.1>1.0", "1.1>1.2", "0.2>0.1", "1.2>1.1"),
    ]


def test_neighbours_of_a_lost_worker_have_links_with_all_that_may_take_its_work():
    found = set(seats_of(wanted(roster(3, 3, "1.1"))))
    whole = {f"{r}.{a}>{r}.{b}" for r in "02" for a, b in ("01", "10", "12", "21")}
    across = {f"1.{end}>{r}.1" for r in "02" for end in "02"} | {f"{r}.1>1.{end}" for r in "02" for end in "02"}
    assert found == whole | across


def test_nobody_has_more_ends_than_fit_and_both_sides_leave_out_the_same():
    found = wanted(roster(12, 3, "3.1"))
    ends = [member for pair in found for member in pair]
    assert max(map(ends.count, set(ends))) == MOST_ENDS
    own = [(one, other) for one, other in found if one.seat.replica == other.seat.replica]
    assert found[: len(own)] == own and len(own) == 11 * 4


# --- mistakes that would be seen ---------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_PAIRS)
def test_a_mistake_is_found(coordinator, monkeypatch, name):
    IN_PAIRS[name](monkeypatch)
    monkeypatch.setattr(pairs, "CONNECT_S", 1.0)

    def finds(failure) -> bool:
        links = Links()
        with two(coordinator, links.open) as ends:
            try:
                failure(ends, links)
            except (AssertionError, WaitTimeout):
                return True
        return False

    monkeypatch.setattr("tests.runtime.test_pairs.until", quickly)
    assert any(map(finds, FAILURES))


def quickly(ready, what: str) -> object:
    return waiting.until(ready, what, 3.0)
