"""The mover of boundary tensors that stay on their accelerator: links of two (runtime/collectives/link.py), beside TCP.

* Each *direction* of a pair of neighbours has a link of its own, so that the order of its operations is the sender's.
  A link has no names: so a tensor is announced over TCP (runtime/movers/wire.py, Apart), by its name, its shape and the
  number of its operation, once that has been launched, and the receiver begins its half when it hears of it.
* A tensor is handed over once its operation counts, which a link decides (runtime/collectives/confirmed.py): an aborted
  kernel ends with garbage.
* Links are made anew for each membership, in the background, in one order that all members have, and none keeps the
  others waiting for longer than a deadline.  Until a link stands, and beyond MOST_ENDS of one worker, tensors pass
  through host memory.
* Where an operation fails, on either side, the link is over for that membership, the other side is told, and the sender
  sends by the host what is not known to have come.  A number that is not the next one is such a failure, and so is an
  operation that takes longer than STUCK_S: kernels of different streams may share a queue of the hardware, where two
  workers' sends can each stand in front of what the other one waits for.
* At the first word of a loss all links are aborted.  What was under way is made good by the recovery, as what is on its
  way over TCP: everybody says what it holds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from recycle_plugin.core.vocabulary.dataflow import Datum
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.link import Broadcast, Handle, Link
from recycle_plugin.runtime.collectives.neighbours import wanted
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kept import Kept
from recycle_plugin.runtime.devices.port import Copy, Tensors
from recycle_plugin.runtime.lines.frames import Nonsense
from recycle_plugin.runtime.movers.outbox import Message, Outbox, Word
from recycle_plugin.runtime.movers.tcp import DEATH_S, LINGER_S, Transport
from recycle_plugin.runtime.movers.wire import Apart, LinkOver, dtype_of, shapes_of

CONNECT_S = 15.0  # for one link to be made, whose first operation may be stuck too: sooner than workers are given up
LOST_S = 10.0  # until what a broken link has lost has come by the host; then the coordinator hears of it
STUCK_S = 10.0  # for an operation, from its start here on: sooner than workers are given up by default
LOOK_S = 1.0  # between two looks at what is under way
OpenPair = Callable[[Session, int, str, Sequence[int], timedelta, torch.device], Link]


class Room(Protocol):
    """An order on the device at ``where`` in which memory for what comes is made."""

    where: torch.device

    def alone(self) -> AbstractContextManager[None]:
        """A context: what the calling thread starts inside, memory too, is in this order."""


class Parcel(NamedTuple):
    """A datum on its way over a link, since ``begun`` of time.monotonic.  ``tensors``: the sender's, as it keeps them,
    or where the receiver takes them.
    """

    datum: Datum
    valid_from: int
    tensors: Kept | Tensors
    begun: float


class Way:
    """One direction between this worker and the one at ``address``, in one membership, over ``link``.

    ``name``: what goes over it.  ``sends``: it is this worker's to send.  ``begun`` operations so far, of which those
    ``under_way`` are not over, by their numbers.  ``over``: nothing begins any more; ``left``: for a membership change,
    or at this worker's end.
    """

    def __init__(self, address: str, sends: bool, link: Link, name: str = "") -> None:
        self.address, self.sends, self.link, self.name = address, sends, link, name
        self.outbox: Outbox | None = None  # where it is announced, once something was
        self.begun = 0
        self.under_way: dict[int, Parcel] = {}
        self.over = self.left = False
        self.turn = threading.Lock()  # of receiving: a peer's connection may be made anew

    @property
    def stands(self) -> bool:
        """Whether what is sent may go over it: its announcement would come."""
        return not self.over and self.link.connected and not (self.outbox is not None and self.outbox.broken)

    @property
    def busy(self) -> bool:
        """Whether something is under way, and the peer may still be there."""
        return bool(self.under_way) and not (self.outbox is not None and self.outbox.broken)

    def is_stuck(self) -> bool:
        """Whether something is under way for longer than STUCK_S."""
        oldest = min((parcel.begun for parcel in [*self.under_way.values()]), default=None)
        return not self.over and oldest is not None and time.monotonic() - oldest > STUCK_S

    def leave(self) -> Handle:
        """Abandon what is under way; the handle is over once nothing is stuck on the device."""
        self.over = self.left = True
        self.under_way.clear()
        return self.link.abort()


class LinkedPairs:
    """The mover (runtime/movers/mover.py) over links that ``open_pair`` opens, and over ``tcp`` for all that does not
    go there.  It is a follower of membership changes (runtime/collectives/outcomes.py).

    ``room`` is where tensors arrive.  ``by_link`` and ``by_host`` count tensors of the accelerator that were sent, by
    the way that they took.
    """

    def __init__(self, session: Session, tcp: Transport, open_pair: OpenPair, room: Room) -> None:
        self._session, self._tcp, self._open, self._room = session, tcp, open_pair, room
        self.address = tcp.address
        self.by_link = self.by_host = 0
        self._out: dict[str, Way] = {}  # by the peer's address
        self._in: dict[str, Way] = {}
        self._given_up = 0  # how often all links were
        self._heard = 0  # of these as the last ones were cut
        self._lost: set[Datum] = set()  # by links that broke, and not yet come by the host
        self._once, self._closed = threading.Lock(), threading.Event()
        self._again: SimpleQueue[tuple[Way, int]] = SimpleQueue()  # what goes by the host after all
        self._resends = False
        tcp.hear = self._hear
        session.follow(self)

    # --- the port -------------------------------------------------------------------------------------

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send a datum to a peer without blocking, over a link if it is on the accelerator and one stands."""
        way = self._out.get(address)
        if isinstance(tensors, Kept):
            if way is not None and way.stands and self._goes_over_links(tensors):
                self._tcp.check()
                self._begin_sending(way, Parcel(datum, valid_from, tensors, time.monotonic()))
                return
            self.by_host += 1
        self._tcp.send(address, datum, tensors, valid_from)

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        """What has come since this was asked last, by either way; see Mover.arrivals."""
        for arrived in self._tcp.arrivals():
            self._lost.discard(arrived[0])
            yield arrived

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when these peers have what was sent over links, and the sockets to them the rest, or they are gone."""
        ways = [way for address in addresses if (way := self._out.get(address)) is not None]

        def taken() -> bool | None:
            self._tcp.check()
            return None if any(way.busy for way in ways) else True

        self._session.waiting.until("a peer to take what is sent to it over a link", taken)
        self._tcp.wait_sent(addresses)

    def hears(self) -> bool:
        """Whether this worker's own listener lets peers in."""
        return self._tcp.hears()

    def hear_out(self, peers: Collection[str]) -> bool:
        """Take what peers other than ``peers`` have sent before they went; see Mover.hear_out.  What is under way over
        a link gets up to 1 s, unless the link is aborted.
        """
        gone = [way for address, way in self._in.items() if address not in peers]
        with self._session.waiting.changed:
            self._session.waiting.changed.wait_for(lambda: not any(way.under_way for way in gone), DEATH_S)
        return self._tcp.hear_out(peers)

    def listen_to(self, peers: Iterable[str]) -> None:
        """Take from now on also what ``peers`` send."""
        self._tcp.listen_to(peers)

    def keep_only(self, members: Iterable[str]) -> None:
        """Send nothing more to anybody but ``members``."""
        peers = set(members)
        for way in self._ways():
            if way.address not in peers:
                way.leave()
        self._tcp.keep_only(peers)

    def close(self) -> None:
        """Stop receiving; what is under way to live peers still gets there, within a second.

        Links stay as they are: they go with the process.
        """
        with self._session.waiting.changed:
            sending = [*self._out.values()]
            self._session.waiting.changed.wait_for(lambda: not any(way.busy for way in sending), LINGER_S)
        for way in self._ways():
            way.over = way.left = True
        self._closed.set()
        self._tcp.close()

    # --- membership changes (runtime.collectives.outcomes.Follower) -----------------------------------

    def give_up_links(self) -> None:
        """End what is under way, since the membership will change at once."""
        self._given_up += 1
        for way in self._ways():
            way.leave()
        self._wake()

    def cut(self) -> list[Handle]:
        """Leave the links of the membership that there was; returns their ends."""
        self._heard = self._given_up
        ends = [way.leave() for way in self._ways()]
        self._out, self._in = {}, {}
        self._lost.clear()
        self._wake()
        return ends

    def go_on(self) -> None:
        """Make links for the membership in force, in the background."""
        ways = [*self._ways_of(self._session.view.number)]
        self._out = {way.address: way for way in ways if way.sends}
        self._in = {way.address: way for way in ways if not way.sends}
        if self._given_up != self._heard or self._session.view.interruption() is not None:
            self.give_up_links()  # the next change has come meanwhile
            return
        for does, name in ((self._connect, "links of two"), (self._watch, "what is stuck")):
            threading.Thread(target=does, args=(ways,), name=f"recycle: {name}", daemon=True).start()

    def _ways(self) -> list[Way]:
        return [*self._out.values(), *self._in.values()]

    def _ways_of(self, generation: int) -> Iterator[Way]:
        session, limit = self._session, timedelta(seconds=self._session.waiting.timeout_s)
        for sender, receiver in wanted(session.view.roster):
            ranks = sender.rank, receiver.rank
            if session.rank in ranks:
                peer, sends = (receiver, True) if sender.rank == session.rank else (sender, False)
                name = f"boundary tensors from rank {ranks[0]} to rank {ranks[1]}"
                link = self._open(
                    session, generation, f"generation{generation} of {name}", ranks, limit, self._room.where
                )
                yield Way(peer.address, sends, link, name)

    def _connect(self, ways: Sequence[Way]) -> None:
        """Make links one after the other: each member is at the first of those that it has still to make."""
        for way in ways:
            if way.over:
                continue
            try:
                way.link.connect().wait(CONNECT_S)
            except Exception:  # the deadline's, NCCL's, the device's: what would go over it goes by the host
                self._fail(way)

    def _watch(self, ways: Sequence[Way]) -> None:
        """Give up links on which something is stuck, until all are over."""
        while not all(way.over for way in ways) and not self._closed.wait(LOOK_S):
            for way in filter(Way.is_stuck, ways):
                self._fail(way)
                text = f"the link for {way.name} is given up: an operation was not over within {STUCK_S:g} s"
                self._session.note("warning", f"{text}. They go by the host until the membership changes")

    # --- sending --------------------------------------------------------------------------------------

    def _goes_over_links(self, kept: Kept) -> bool:
        """Whether all of it is on the accelerator, and there is something of it."""
        whole = [tensor for tensor in kept.tensors if tensor.numel()]
        return bool(whole) and all(
            tensor.device == self._room.where and tensor.layout is torch.strided for tensor in whole
        )

    def _begin_sending(self, way: Way, parcel: Parcel) -> None:
        assert isinstance(parcel.tensors, Kept), "what is sent is kept"
        number, tensors, outbox = way.begun, parcel.tensors.tensors, self._outbox(way)
        way.begun += 1
        way.under_way[number] = parcel
        said = Word(Apart(parcel.datum, parcel.valid_from, shapes_of(tensors), way.link.generation, number))
        handle = way.link.start(Broadcast(_as_bytes(tensors), 0), lambda: outbox.send(said))
        handle.when_over(lambda: self._sent(way, number, handle))

    def _outbox(self, way: Way) -> Outbox:
        way.outbox = way.outbox or self._tcp.outbox(way.address)
        return way.outbox

    def _sent(self, way: Way, number: int, handle: Handle) -> None:
        """Take down what has become of an operation; called in any thread."""
        if handle.error is None:
            if way.under_way.pop(number, None) is not None:
                self.by_link += 1
            self._wake()
        elif way.left:
            way.under_way.pop(number, None)
        else:
            self._fail(way)
            self._again.put((way, number))

    def _fail(self, way: Way) -> None:
        """End a way for this membership, and tell the other side; it blocks nobody."""
        with self._once:
            if way.over:
                return
            way.over = True
            if not self._resends:
                self._resends = True
                threading.Thread(target=self._send_again, name="recycle: by the host again", daemon=True).start()
        threading.Thread(target=self._end, args=(way,), name="recycle: the end of a link of two", daemon=True).start()

    def _end(self, way: Way) -> None:
        way.link.abort()
        self._outbox(way).send(Word(LinkOver(way.link.generation, way.sends)))

    def _send_again(self) -> None:
        """Send by the host what a link has not brought; a thread of its own, as the copy to the host may wait."""
        session = self._session
        while True:
            way, number = self._again.get()
            parcel = way.under_way.get(number)
            if parcel is None or way.left or (0 < parcel.datum.step <= session.view.committed):
                way.under_way.pop(number, None)
                continue
            assert isinstance(parcel.tensors, Kept), "what is sent is kept"
            self.by_host += 1
            message = Message(parcel.datum, parcel.valid_from, parcel.tensors, session.waiting.timeout_s)
            try:
                self._outbox(way).send(message)
            except Exception as error:  # of the copy to the host, which the thread that trains has to know
                self._tcp.failed(RecycleError(f"{message} could not be sent: {error}"))
            way.under_way.pop(number, None)
            self._wake()

    # --- receiving ------------------------------------------------------------------------------------

    def _hear(self, sender: str, message: object) -> None:
        """Take what a peer says beside its headers, in a thread of that peer's; raises Nonsense."""
        if isinstance(message, Apart):
            self._tcp.check_step(message.datum)
            self._begin_receiving(sender, message)
        elif isinstance(message, LinkOver):
            way = (self._in if message.sends else self._out).get(sender)
            if way is not None and way.link.generation == message.generation:
                self._fail(way)
        else:
            raise Nonsense(f"a {type(message).__name__} where it should be the header of a tensor")

    def _begin_receiving(self, sender: str, message: Apart) -> None:
        way = self._in.get(sender)
        if way is None or way.link.generation != message.generation:
            if message.generation < self._session.view.number:
                return  # of a membership that is over: it is sent again if it is needed
            raise Nonsense(f"{message.datum} over a link of generation {message.generation}, which there is not")
        with way.turn:
            if way.over:
                return  # its sender hears of that, and sends it by the host
            if message.number != way.begun:
                self._fail(way)
                return
            way.begun += 1
            try:
                tensors = self._places_for(message)
                way.under_way[message.number] = Parcel(message.datum, message.valid_from, tensors, time.monotonic())
                handle = way.link.start(Broadcast(_as_bytes(tensors), 0))
            except Nonsense:
                raise
            except Exception:  # of this worker's device, without room perhaps: by the host it may still find a place
                way.under_way.pop(message.number, None)
                self._fail(way)
                return
        handle.when_over(lambda: self._came(way, message.number, handle))

    def _places_for(self, message: Apart) -> Tensors:
        """Uninitialised tensors on the device.  Raises Nonsense for shapes that can't be."""
        dtypes = [dtype_of(name) for name, _ in message.tensors]
        try:
            with self._room.alone():
                return tuple(
                    torch.empty(shape, dtype=dtype, device=self._room.where)
                    for dtype, (_, shape) in zip(dtypes, message.tensors, strict=True)
                )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, OverflowError) as error:
            raise Nonsense(f"tensors of shapes {str(message.tensors)[:80]}: {str(error)[:200]}") from None

    def _came(self, way: Way, number: int, handle: Handle) -> None:
        """Hand over what has come and counts; called in any thread."""
        parcel = way.under_way.pop(number, None)
        if parcel is not None and handle.error is None:
            assert not isinstance(parcel.tensors, Kept), "what comes is kept by nobody yet"
            self._tcp.deliver(way.address, parcel.datum, parcel.valid_from, parcel.tensors)
        elif parcel is not None and not way.left:
            self._lost.add(parcel.datum)
            timer = threading.Timer(LOST_S, self._complain, (way, parcel.datum))
            timer.daemon = True
            timer.start()
            self._fail(way)
        self._wake()

    def _complain(self, way: Way, datum: Datum) -> None:
        """Tell the coordinator of what neither the link nor the host has brought, if the membership is the same."""
        if datum in self._lost and not way.left and not self._tcp.has(datum):
            self._tcp.say_broken(way.address, f"{datum} over a link of two", way.link.generation)

    def _wake(self) -> None:
        with self._session.waiting.changed:
            self._session.waiting.changed.notify_all()


def _as_bytes(tensors: Tensors) -> list[torch.Tensor]:
    """Their memory, as what every link carries, whatever dtypes it knows; nothing of those without elements."""
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
