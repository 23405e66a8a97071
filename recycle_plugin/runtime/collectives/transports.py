"""What connects workers, made here and nowhere else: a group's links, and the mover of boundary tensors.

Both go by the kind of device whose tensors they carry.  What is not in these tables passes through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from recycle_plugin.runtime.collectives.gloo import GlooLink, Rendezvous
from recycle_plugin.runtime.collectives.link import Link
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.movers.mover import Mover
from recycle_plugin.runtime.movers.tcp import Transport

MakeLink = Callable[[Session, int, str, Sequence[int], timedelta], Link]


def _over_gloo(session: Session, generation: int, called: str, ranks: Sequence[int], timeout: timedelta) -> Link:
    meeting, name = Rendezvous(session, called, ranks), f"ranks {', '.join(map(str, ranks))}"
    return GlooLink(generation, meeting, name, session.own_address, timeout)


LINKS: dict[str, MakeLink] = {HOST.type: _over_gloo}  # by kind of device
MOVERS: dict[str, Callable[[Session, Device], Mover]] = {HOST.type: Transport}


def open_link(
    session: Session, generation: int, called: str, ranks: Sequence[int], timeout: timedelta, kind: str = HOST.type
) -> Link:
    """A link of ``generation`` among ``ranks``, which is ``called`` so in the job, for tensors on devices of this
    ``kind``.
    """
    return LINKS.get(kind, _over_gloo)(session, generation, called, ranks, timeout)


def open_mover(session: Session, device: Device) -> Mover:
    """The mover of this worker's boundary tensors, which are computed with on ``device``."""
    return MOVERS.get(device.kind, Transport)(session, device)
