"""The door for newcomers at a source of its stage's state: a listener, made at the first need.

Only newcomers that the coordinator has announced are let in.
"""

from __future__ import annotations

import ipaddress
import socket
import threading

import psutil

from recycle_plugin.authentication.door import Door
from recycle_plugin.authentication.handshake import Port, Proved
from recycle_plugin.core.vocabulary.describe import named
from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.catch_up.outlet import TcpOutlet
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.catch_up.served import Served
from recycle_plugin.runtime.catch_up.wire import FRAMES, LONGEST_HELLO, Arrival
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.lines.frames import Nonsense
from recycle_plugin.runtime.lines.listener import Listener

HELLO_S = 10.0  # for a caller to say who it is


class StateListener:
    """Lets newcomers in to the worker of ``session``, on the setting ``interface``; ``rate``: for all of them together.
    Raises RecycleError for an unusable interface.
    """

    def __init__(self, session: Session, interface: str | None, rate: Rate) -> None:
        self._session, self._rate = session, rate
        self._expected: dict[WorkerId, TcpOutlet] = {}
        self._lock = threading.Lock()
        host = address_of(interface) if interface else session.own_address
        door = Door(
            session.secret, Port.STATE, f"at {named(session.rank)}, for the stage's state,", session.note_stranger
        )
        try:
            self._listener = Listener(host, door, "state for newcomers", self._note, self._takes, HELLO_S)
        except OSError as error:
            setting = f"recycle.transfer_interface: {interface}" if interface else host
            why = f"no newcomer could connect there ({error.strerror}); name another one"
            raise RecycleError(f"{setting}: {why}") from None
        self.address = self._listener.address

    def expect(self, newcomer: WorkerId) -> TcpOutlet:
        """Return the line for an announced newcomer, before it comes; its earlier line ends."""
        outlet = TcpOutlet(newcomer, self._rate, self._note, self._tell)
        with self._lock:
            self._expected = {one: each for one, each in self._expected.items() if not each.broken}
            before, self._expected[newcomer] = self._expected.get(newcomer), outlet
        if before is not None:
            before.close()
        return outlet

    def close(self) -> None:
        """Let nobody in any more, and end all lines once their sent data has arrived."""
        self._listener.close()
        with self._lock:
            outlets = [*self._expected.values()]
        for outlet in outlets:
            outlet.close()

    def _note(self, text: str) -> None:
        self._session.note("warning", text)

    def _tell(self, newcomer: WorkerId, served: Served) -> None:
        who = self._session.view.member
        seat = {} if who is None else {"seat": str(who.seat)}
        text = f"{self._session.view} has sent {named(newcomer.rank)} {served}"
        self._session.note("served", text, **seat, newcomer=newcomer.rank, **served.details())

    def _takes(self, own: socket.socket, proved: Proved) -> bool:
        """Pass a connection to the line of its newcomer; raises Nonsense if that is not expected."""
        connection, seals = proved
        arrival = FRAMES.receive(connection, Arrival, seals.into, LONGEST_HELLO)
        with self._lock:
            outlet = self._expected.get(arrival.newcomer)
        if outlet is None or arrival.job != self._session.job_id or not outlet.take(connection, seals):
            raise Nonsense(f"it is {arrival.newcomer} of job {arrival.job[:80]!r}, which is not expected here")
        return True


def address_of(interface: str) -> str:
    """Return the address of a network interface, given by name or address; raises RecycleError for neither."""
    found = psutil.net_if_addrs()
    if interface in found:
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in found[interface]:
                if one.family == family:
                    return str(one.address)
        raise RecycleError(f"recycle.transfer_interface: {interface} has no IP address; name another one of this host")
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        raise RecycleError(
            f"recycle.transfer_interface: {interface!r} is neither an address nor one of this host's network "
            f"interfaces, which are {', '.join(sorted(found))}"
        ) from None
