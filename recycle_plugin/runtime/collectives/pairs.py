"""The mover of boundary tensors that stay on their accelerator: links of two (runtime/collectives/link.py), and TCP.

* Each *direction* between two neighbours has its own link, so the order of its operations is the sender's. A link knows
  no names, so TCP announces each tensor (runtime/movers/wire.py, Apart) by name, shape and operation number, once the
  operation is launched. The receiver starts its half when it hears that.
* A tensor is delivered once its operation counts, which the link decides (runtime/collectives/confirmed.py): an aborted
  kernel ends with garbage.
* Links are made anew for each membership, in the background, in one order for all members; no link holds up the others
  past a deadline. Until a link stands, and beyond MOST_ENDS of one worker, tensors pass through host memory.
* If an operation fails on either side, the link is over for that membership, and the other side is told. The sender
  then sends through the host what is not known to have come. A number that is not the next one is a failure. So is an
  operation that takes longer than STUCK_S: kernels of different streams may share a hardware queue, where two workers'
  sends can each block what the other waits for.
* The first word of a loss aborts all links. Recovery replaces what was under way, as for TCP: all report what they
  hold.
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
from recycle_plugin.runtime.devices.host import bytes_of
from recycle_plugin.runtime.devices.kept import Kept
from recycle_plugin.runtime.devices.port import Copy, Tensors
from recycle_plugin.runtime.lines.frames import Nonsense
from recycle_plugin.runtime.movers.outbox import Message, Outbox, Word
from recycle_plugin.runtime.movers.tcp import DEATH_S, LINGER_S, Transport
from recycle_plugin.runtime.movers.wire import Apart, LinkOver, dtype_of, shapes_of

CONNECT_S = 15.0  # to make one link, whose first operation may be stuck too: shorter than until workers are given up
LOST_S = 10.0  # for a broken link's tensors to come through the host; then the coordinator is told
STUCK_S = 10.0  # for an operation, from its start here: shorter than the default until workers are given up
LOOK_S = 1.0  # between two checks of what is under way
OpenPair = Callable[[Session, int, str, Sequence[int], timedelta, torch.device], Link]


class Room(Protocol):
    """A device order at ``where``, in which memory for arriving tensors is made."""

    where: torch.device

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread's device work, allocations too, is in this order."""


class Parcel(NamedTuple):
    """A datum on a link since ``begun`` (time.monotonic). ``tensors``: the sender's, or the receiver's to be filled."""

    datum: Datum
    valid_from: int
    tensors: Kept | Tensors
    begun: float


class Way:
    """One direction between this worker and the one at ``address``, in one membership, over ``link``.

    ``name``: of its tensors, in messages. ``sends``: this worker is the sender. ``begun``: operations started so far;
    ``under_way``: the unfinished ones by number. ``over``: nothing starts any more; ``left``: that is for a membership
    change or this worker's end.
    """

    def __init__(self, address: str, sends: bool, link: Link, name: str = "") -> None:
        self.address, self.sends, self.link, self.name = address, sends, link, name
        self.outbox: Outbox | None = None  # for announcements, once something was sent
        self.begun = 0
        self.under_way: dict[int, Parcel] = {}
        self.over = self.left = False
        self.turn = threading.Lock()  # of receiving: a peer may connect anew

    @property
    def stands(self) -> bool:
        """Whether tensors may be sent over it: the link is connected, and announcements would arrive."""
        return not self.over and self.link.connected and not (self.outbox is not None and self.outbox.broken)

    @property
    def busy(self) -> bool:
        """Whether something is under way to or from a peer that may still be there."""
        return bool(self.under_way) and not (self.outbox is not None and self.outbox.broken)

    def is_stuck(self) -> bool:
        """Return whether something has been under way for longer than STUCK_S."""
        oldest = min((parcel.begun for parcel in [*self.under_way.values()]), default=None)
        return not self.over and oldest is not None and time.monotonic() - oldest > STUCK_S

    def leave(self) -> Handle:
        """Abandon operations under way. The handle is over once nothing is stuck on the device."""
        self.over = self.left = True
        self.under_way.clear()
        return self.link.abort()


class LinkedPairs:
    """The mover (runtime/movers/mover.py) over links that ``open_pair`` opens, and over ``tcp`` for everything else.

    It follows membership changes (runtime/collectives/outcomes.py). ``room``: where tensors arrive. ``by_link`` and
    ``by_host`` count sent tensors of the accelerator by their way.
    """

    def __init__(self, session: Session, tcp: Transport, open_pair: OpenPair, room: Room) -> None:
        self._session, self._tcp, self._open, self._room = session, tcp, open_pair, room
        self.address = tcp.address
        self.by_link = self.by_host = 0
        self._out: dict[str, Way] = {}  # by the peer's address
        self._in: dict[str, Way] = {}
        self._given_up = 0  # how often all links were given up
        self._heard = 0  # ``_given_up`` when the last links were cut
        self._lost: set[Datum] = set()  # by broken links, and not yet come through the host
        self._once, self._closed = threading.Lock(), threading.Event()
        # operations whose tensors go through the host after all
        self._again: SimpleQueue[tuple[Way, int]] = SimpleQueue()
        self._resends = False
        tcp.hear = self._hear
        session.follow(self)

    # --- the port -------------------------------------------------------------------------------------

    def send(self, address: str, datum: Datum, tensors: Copy, valid_from: int) -> None:
        """Send a datum to a peer without blocking; over a link if it is on the accelerator and a link stands."""
        way = self._out.get(address)
        if isinstance(tensors, Kept):
            if way is not None and way.stands and self._goes_over_links(tensors):
                self._tcp.check()
                self._begin_sending(way, Parcel(datum, valid_from, tensors, time.monotonic()))
                return
            self.by_host += 1
        self._tcp.send(address, datum, tensors, valid_from)

    def arrivals(self) -> Iterator[tuple[Datum, Tensors, int]]:
        """Yield the tensors received since the last call, over links and over TCP; see Mover.arrivals."""
        for arrived in self._tcp.arrivals():
            self._lost.discard(arrived[0])
            yield arrived

    def wait_sent(self, addresses: Iterable[str]) -> None:
        """Return when these peers have received the tensors sent over links, and their sockets the rest, or the peers
        are gone.
        """
        ways = [way for address in addresses if (way := self._out.get(address)) is not None]

        def taken() -> bool | None:
            self._tcp.check()
            return None if any(way.busy for way in ways) else True

        self._session.waiting.until("a peer to take what is sent to it over a link", taken)
        self._tcp.wait_sent(addresses)

    def hears(self) -> bool:
        """Return whether this worker's own listener lets peers in."""
        return self._tcp.hears()

    def hear_out(self, peers: Collection[str]) -> bool:
        """Receive all that peers other than ``peers`` have sent; see Mover.hear_out. Operations under way over a link
        get up to 1 s, unless the link is aborted.
        """
        gone = [way for address, way in self._in.items() if address not in peers]
        with self._session.waiting.changed:
            self._session.waiting.changed.wait_for(lambda: not any(way.under_way for way in gone), DEATH_S)
        return self._tcp.hear_out(peers)

    def listen_to(self, peers: Iterable[str]) -> None:
        self._tcp.listen_to(peers)

    def keep_only(self, members: Iterable[str]) -> None:
        peers = set(members)
        for way in self._ways():
            if way.address not in peers:
                way.leave()
        self._tcp.keep_only(peers)

    def close(self) -> None:
        """Stop receiving. Data under way to live peers still arrives, within a second. Links end with the process."""
        with self._session.waiting.changed:
            sending = [*self._out.values()]
            self._session.waiting.changed.wait_for(lambda: not any(way.busy for way in sending), LINGER_S)
        for way in self._ways():
            way.over = way.left = True
        self._closed.set()
        self._tcp.close()

    # --- membership changes (runtime.collectives.outcomes.Follower) -----------------------------------

    def give_up_links(self) -> None:
        """End operations under way: the membership is about to change."""
        self._given_up += 1
        for way in self._ways():
            way.leave()
        self._session.waiting.wake()

    def cut(self) -> list[Handle]:
        """Leave the old membership's links; returns their ends."""
        self._heard = self._given_up
        ends = [way.leave() for way in self._ways()]
        self._out, self._in = {}, {}
        self._lost.clear()
        self._session.waiting.wake()
        return ends

    def go_on(self) -> None:
        """Make links for the membership in force, in the background."""
        ways = [*self._ways_of(self._session.view.number)]
        self._out = {way.address: way for way in ways if way.sends}
        self._in = {way.address: way for way in ways if not way.sends}
        if self._given_up != self._heard or self._session.view.interruption() is not None:
            self.give_up_links()  # another change is coming already
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
        """Make links one after the other. All use one order, so each member works at the first one still missing."""
        for way in ways:
            if way.over:
                continue
            try:
                way.link.connect().wait(CONNECT_S)
            except Exception:  # a deadline, or an error of NCCL or the device: its tensors go through the host
                self._fail(way)

    def _watch(self, ways: Sequence[Way]) -> None:
        """Give up stuck links, until all links are over."""
        while not all(way.over for way in ways) and not self._closed.wait(LOOK_S):
            for way in filter(Way.is_stuck, ways):
                self._fail(way)
                text = f"the link for {way.name} is given up: an operation was not over within {STUCK_S:g} s"
                self._session.note("warning", f"{text}. Its tensors go through the host until the membership changes")

    # --- sending --------------------------------------------------------------------------------------

    def _goes_over_links(self, kept: Kept) -> bool:
        """Whether all non-empty tensors are on the accelerator, and there is one."""
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
        """Record the outcome of an operation; called in any thread."""
        if handle.error is None:
            if way.under_way.pop(number, None) is not None:
                self.by_link += 1
            self._session.waiting.wake()
        elif way.left:
            way.under_way.pop(number, None)
        else:
            self._fail(way)
            self._again.put((way, number))

    def _fail(self, way: Way) -> None:
        """End a way for this membership, and tell the other side; does not block."""
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
        """Send through the host the tensors that a link has not delivered, in a thread of its own: the copy to the host
        may block.
        """
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
            except Exception as error:  # of the copy to the host; the training thread has to know
                self._tcp.failed(RecycleError(f"{message} could not be sent: {error}"))
            way.under_way.pop(number, None)
            self._session.waiting.wake()

    # --- receiving ------------------------------------------------------------------------------------

    def _hear(self, sender: str, message: object) -> None:
        """Handle a peer's words beside its headers, in that peer's thread; raises Nonsense."""
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
                return  # of a past membership: it is sent again if needed
            raise Nonsense(f"{message.datum} over a link of generation {message.generation}, which does not exist")
        with way.turn:
            if way.over:
                return  # its sender is told, and sends it through the host
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
            except Exception:  # this worker's device may be full; through the host it may still fit
                way.under_way.pop(message.number, None)
                self._fail(way)
                return
        handle.when_over(lambda: self._came(way, message.number, handle))

    def _places_for(self, message: Apart) -> Tensors:
        """Allocate uninitialised tensors on the device. Raises Nonsense for impossible shapes."""
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
        """Deliver a tensor whose operation counts. Any thread may call this."""
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
        self._session.waiting.wake()

    def _complain(self, way: Way, datum: Datum) -> None:
        """Tell the coordinator of a tensor that came by neither way, if the membership is still the same."""
        if datum in self._lost and not way.left and not self._tcp.has(datum):
            self._tcp.say_broken(way.address, f"{datum} over a link of two", way.link.generation)


def _as_bytes(tensors: Tensors) -> list[torch.Tensor]:
    """View the non-empty tensors as bytes, which every link carries whatever their dtypes."""
    return [bytes_of(tensor) for tensor in tensors if tensor.numel()]
