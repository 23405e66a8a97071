"""The link over NCCL, confirmed over Gloo, does what every link has to do (tests/support/link_port.py), with tensors on
an accelerator; and what only NCCL asks of it.

Nobody's death is heard of but through the coordinator, whose word each member's process here gets from the test.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from recycle_plugin.errors import WaitTimeout
from recycle_plugin.runtime.collectives import nccl as product
from recycle_plugin.runtime.collectives import transports
from recycle_plugin.runtime.collectives.confirmed import ConfirmedLink
from recycle_plugin.runtime.collectives.link import AllReduce, Barrier, Broadcast, Send
from recycle_plugin.runtime.collectives.nccl import Meeting, NcclLink
from recycle_plugin.runtime.collectives.nccl_door import LIMIT
from recycle_plugin.runtime.control.connections import connect
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of
from tests.mistakes.nccl import IN_LINKS
from tests.support.link_port import *  # noqa: F403  tests
from tests.support.link_port import SHORT_S, failure_of, name_of
from tests.support.members import LONG_S, Place, in_processes
from tests.support.secret import SECRET, way
from tests.support.waiting import until


def enter(place: Place, port: int, coordinator: tuple[str, int], index: int = 0) -> None:
    from tests.support import standin
    from tests.support.standin import nccl

    standin.configure(late=3)
    torch.set_default_device(standin.NAME)
    product.dist.ProcessGroupNCCL = nccl.ProcessGroupNCCL
    session, links = Session(connect(way(coordinator), LONG_S), place.position, SECRET), []
    place.meetings = {}
    ranks, limit, where = range(place.members), timedelta(seconds=LONG_S), torch.device(standin.NAME, index)

    def made(generation: int) -> ConfirmedLink:
        over = transports.over_nccl(
            product.process_group, session, generation, f"link{generation}", ranks, limit, where
        )
        links.append(over)
        return over

    def unconfirmed(generation: int = 1) -> NcclLink:
        meeting, lane = Meeting(session, f"link{generation}", ranks), device_of(where).lane()
        place.meetings[generation] = meeting
        links.append(NcclLink(generation, meeting, name_of(place.members), lane, limit, product.process_group))
        return links[-1]

    def listen(member: int) -> None:
        """As a session does, to which the coordinator says that somebody is lost."""
        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        store.wait([f"lost {member}"], timedelta(seconds=2 * LONG_S))
        for link in links:
            link.abort()

    for member in range(place.members):
        threading.Thread(target=listen, args=(member,), daemon=True).start()
    place.made, place.unconfirmed = made, unconfirmed


def over_nccl(scenario, members: int, enter: Callable = enter) -> list[Any]:
    return in_processes(scenario, members, enter, ["torch", "torch._dynamo"], coordinated=True)


def launched(link: NcclLink) -> Any:
    """The event behind the last operation that has been launched, if one was."""
    return link._launched and link._launched[-1].over


def calling(link: NcclLink) -> bool:
    """Whether NCCL's call that makes the group is under way."""
    return link._group is not None and link._group._line is not None


@pytest.fixture
def run():
    return over_nccl


# --- NCCL's own --------------------------------------------------------------------------------------


def garbage_is_no_result(place: Place) -> tuple[str, bool, str, float]:
    """The abort of a stuck sum lets its event happen."""
    link, total, again = place.unconfirmed(), torch.ones(4), torch.ones(1)
    link.connect().wait(LONG_S)
    place.meet("connected")
    if place.position == 1:
        place.hear("aborted", 0)
        link.abort().wait(LONG_S)
    else:
        handle = link.start(AllReduce([total], ReduceOp.SUM))
        over = until(lambda: launched(link), "launch")
        assert not over.poll() and not handle.poll()
        down = link.abort()
        down.wait(LONG_S)
        assert over.poll() and bool(total.isnan().all()) and failure_of(handle) == "Broken"
        assert link.abort() is down
        place.say("aborted")
    second = place.unconfirmed(2)
    second.start(AllReduce([again], ReduceOp.SUM)).wait(LONG_S)
    return again.item(), failure_of(link.start(Barrier())), link.connected, second.connected


def test_what_an_abort_has_ended_is_broken_and_a_new_group_works():
    assert over_nccl(garbage_is_no_result, 2) == [(2.0, "Broken", False, True)] * 2


def a_launch_fails(place: Place) -> list[str]:
    """The first member's second sum, of three; the second member begins all, and hears of it as of a loss."""
    link, kind, totals = place.link(), product.dist.ProcessGroupNCCL, [torch.ones(1) for _ in range(3)]
    link.connect().wait(LONG_S)
    place.meet("connected")
    whole, calls = kind.allreduce, []

    def failing(self, *given):
        calls.append(given)
        if len(calls) == 2:
            raise dist.DistBackendError("NCCL timeout in: a launch")
        return whole(self, *given)

    if place.position == 0:
        kind.allreduce = failing
    handles = [link.start(AllReduce(totals[:1], ReduceOp.SUM))]
    handles[0].wait(LONG_S)
    handles += [link.start(AllReduce([total], ReduceOp.SUM)) for total in totals[1:]]
    if place.position == 0:
        until(lambda: all(handle.poll() for handle in handles), "ends")
        place.say("failed")
    else:
        place.hear("failed", 0)
        link.abort().wait(LONG_S)
    return [failure_of(handle) for handle in handles]


def test_behind_a_launch_that_fails_nothing_is_taken_for_another_sum():
    """NCCL's operations have no names: the third of one member would meet the second of the other."""
    assert over_nccl(a_launch_fails, 2) == [["none", "Broken", "Broken"]] * 2


def several_are_stuck(place: Place) -> list[str]:
    """Four links, each with a sum that the other member never starts, are aborted in a row."""
    links = [place.unconfirmed(generation) for generation in range(4)]
    for link in links:
        link.connect().wait(LONG_S)
    place.meet("connected")
    handles = []
    if place.position == 0:
        handles = [link.start(AllReduce([torch.ones(1)], ReduceOp.SUM)) for link in links]
        until(lambda: all(map(launched, links)), "launches")
    for down in [link.abort() for link in links]:
        down.wait(LONG_S)
    place.meet("over")
    return [failure_of(handle) for handle in handles]


def test_several_stuck_links_are_aborted_at_once():
    assert over_nccl(several_are_stuck, 2) == [["Broken"] * 4, []]


CALL_S = "0.3"  # of the call that makes a group


def a_group_is_being_made(place: Place) -> tuple[str, str]:
    """The second member has come, and then makes no group; the first is in NCCL's call."""
    os.environ[LIMIT] = CALL_S
    link = place.unconfirmed()
    if place.position == 1:
        place.meetings[1].come(timedelta(seconds=LONG_S))
        place.hear("aborted", 0)
        return "none", "none"
    connecting = link.connect()
    until(lambda: calling(link), "call")
    down = link.abort()
    down.wait(LONG_S)
    place.say("aborted")
    return failure_of(connecting), failure_of(link.start(Barrier()))


def test_an_abort_ends_a_first_call_that_blocks():
    """Once that has given up by itself: it holds the lock."""
    assert over_nccl(a_group_is_being_made, 2) == [("Broken", "Broken"), ("none", "none")]


def a_member_is_slow(place: Place) -> tuple[float, bool]:
    """The second member has come, and makes the group only after the first one's call was given up, and made again."""
    os.environ[LIMIT], calls = CALL_S, []
    kind, total = product.dist.ProcessGroupNCCL, torch.ones(1)
    whole = kind.allreduce

    def counted(self, *given):
        calls.append(given)
        if len(calls) == 3:
            place.say("waited")
        return whole(self, *given)

    link = place.unconfirmed()
    if place.position == 1:
        place.meetings[1].come(timedelta(seconds=LONG_S))
        place.hear("waited", 0)
    else:
        kind.allreduce = counted
    link.start(AllReduce([total], ReduceOp.SUM)).wait(LONG_S)
    return total.item(), link.connected


def test_a_group_that_takes_longer_than_a_call_may_is_made_all_the_same():
    assert over_nccl(a_member_is_slow, 2) == [(2.0, True)] * 2


def an_abort_does_not_end(place: Place) -> str:
    """Another group of the process is stuck, and nobody aborts that."""
    link, other = place.unconfirmed(1), place.unconfirmed(2)
    for each in (link, other):
        each.connect().wait(LONG_S)
    place.meet("connected")
    if place.position == 1:
        place.hear("over", 0)
        return ""
    product.ABORT_S = SHORT_S
    for each in (link, other):
        each.start(Broadcast([torch.ones(1)], 1))
    until(lambda: launched(other), "launch")
    try:
        link.abort().wait(SHORT_S)
        return "it has ended"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        place.say("over")


def test_an_abort_that_does_not_end_is_named_at_a_deadline():
    words = "WaitTimeout: waited 0.2 s for the end of NCCL's group among ranks 0, 1"
    assert over_nccl(an_abort_does_not_end, 2) == [words, ""]


def enter_on_the_second(place: Place, port: int, coordinator: tuple[str, int]) -> None:
    os.environ["RECYCLE_TEST_STANDIN_DEVICES"] = "2"
    enter(place, port, coordinator, index=1)


def devices_of_calls(place: Place) -> set[int]:
    kind, used = product.dist.ProcessGroupNCCL, []

    def noting(call):
        def noted(*given):
            used.append(torch.accelerator.current_device_index())
            return call(*given)

        return noted

    for name in ("__init__", "allreduce", "broadcast", "abort"):
        setattr(kind, name, noting(getattr(kind, name)))
    link = place.unconfirmed()
    link.start(Broadcast([torch.ones(1, device="standin:1")], 0)).wait(LONG_S)
    place.meet("over")
    link.abort()
    until(lambda: len(used) == 4, "an abort")
    return set(used)


def test_no_thread_of_a_link_uses_another_device_than_the_workers():
    """A thread that has chosen none would wake the first, where each process takes memory."""
    assert over_nccl(devices_of_calls, 2, enter_on_the_second) == [{1}] * 2


def a_message_between_two(place: Place) -> str:
    try:
        place.unconfirmed().start(Send(torch.ones(1), 1, 0)).wait(LONG_S)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_messages_between_two_are_refused():
    words = "RecycleError: Send among ranks 0: messages between two go through the host's memory"
    assert over_nccl(a_message_between_two, 1) == [words]


# --- mistakes that would be seen ---------------------------------------------------------------------


def abort_in_turn() -> None:
    take_down, turn = NcclLink._take_down, threading.Lock()

    def changed(self: NcclLink) -> None:
        with turn:
            take_down(self)

    NcclLink._take_down = changed


def make_it_blocking() -> None:
    kind = dist.ProcessGroupNCCL
    product.process_group = lambda store, position, members, timeout: kind(store, position, members, kind.Options())


def ends(place: Place, plant: Callable[[], None], links: int, begin: Callable[[NcclLink], bool]) -> list[bool]:
    """Whether the abort of each of the first member's links ends in a time that is enough without the mistake."""
    plant()
    made = [place.unconfirmed(number) for number in range(links)]
    if place.position == 1:
        for number, link in enumerate(made):
            if plant is make_it_blocking:
                place.meetings[number].come(timedelta(seconds=LONG_S))
            else:
                link.connect().wait(LONG_S)
        place.hear("seen", 0)
        return []
    for link in made:
        until(lambda link=link: begin(link), "what is to be aborted")
    found = []
    for down in [link.abort() for link in made]:
        try:
            down.wait(2.0)
            found.append(True)
        except WaitTimeout:
            found.append(False)
    place.say("seen")
    return found


def in_turn(place: Place) -> list[bool]:
    begun = set()

    def begin(link: NcclLink) -> bool:
        link.connect().wait(LONG_S)
        if link not in begun:
            begun.add(link)
            link.start(Broadcast([torch.ones(1)], 1))
        return bool(launched(link))

    return ends(place, abort_in_turn, 2, begin)


def blocking(place: Place) -> list[bool]:
    def begin(link: NcclLink) -> bool:
        link.connect()
        return calling(link)

    return ends(place, make_it_blocking, 1, begin)


def sum_that_is_aborted(place: Place, mistake: str) -> str:
    link = place.unconfirmed()
    link.connect().wait(LONG_S)
    place.meet("connected")
    if place.position == 1:
        place.hear("aborted", 0)
        return ""
    IN_LINKS.get(mistake, bool)()
    handle = link.start(AllReduce([torch.ones(4)], ReduceOp.SUM))
    until(lambda: link._launched and link._launched[-1].over, "launch")
    link.abort().wait(LONG_S)
    place.say("aborted")
    return failure_of(handle)


@pytest.mark.parametrize("mistake", ["", *IN_LINKS])
def test_counting_what_an_abort_has_ended_would_be_seen(mistake):
    scenario = partial(sum_that_is_aborted, mistake=mistake)
    assert over_nccl(scenario, 2) == ["none" if mistake else "Broken", ""]


@pytest.mark.parametrize("scenario, links", [(in_turn, 2), (blocking, 1)])
def test_aborts_in_turn_and_calls_that_block_would_be_seen(scenario, links):
    assert over_nccl(scenario, 2) == [[False] * links, []]
