"""The links of groups and the movers of boundary tensors; they are made here and nowhere else.

The kind of the tensors' device chooses both. Kinds that are not in these tables pass through host memory. So do
messages, and collectives and boundary tensors too unless the setting ``device_link`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives import nccl_door
from recycle_plugin.runtime.collectives.confirmed import ConfirmedLink
from recycle_plugin.runtime.collectives.gloo import GlooLink, Rendezvous
from recycle_plugin.runtime.collectives.link import Link, among
from recycle_plugin.runtime.collectives.nccl import GroupMade, Meeting, NcclLink, process_group, takes, thin_group
from recycle_plugin.runtime.collectives.pairs import LinkedPairs
from recycle_plugin.runtime.control.session import THROUGH_HOST, Session
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.kinds import NVIDIA, accelerator_at, device_of
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.movers.mover import Mover
from recycle_plugin.runtime.movers.tcp import Transport

MakeLink = Callable[[Session, int, str, Sequence[int], timedelta, torch.device], Link]


class Way(NamedTuple):
    """How collectives on one kind of device are carried. ``prepare`` sets the environment, or raises RecycleError.

    ``takes(dtype, op)``: whether these can be carried and combined. ``open_thin``: opens links for boundary tensors, of
    which a worker has many; by default as others.
    """

    open: MakeLink
    prepare: Callable[[MutableMapping[str, str]], None] = lambda environment: None
    takes: Callable[[torch.dtype, ReduceOp | None], bool] = lambda dtype, op: True
    open_thin: MakeLink | None = None


def _over_gloo(
    session: Session, generation: int, called: str, ranks: Sequence[int], timeout: timedelta, where: torch.device
) -> Link:
    return GlooLink(generation, Rendezvous(session, called, ranks), among(ranks), session.own_address, timeout)


def over_nccl(
    make: GroupMade,
    session: Session,
    generation: int,
    called: str,
    ranks: Sequence[int],
    timeout: timedelta,
    where: torch.device,
) -> Link:
    """Open a link over NCCL. ``make`` makes its groups; results are confirmed over Gloo."""
    meeting, lane = Meeting(session, called, ranks), accelerator_at(where).lane()
    link = NcclLink(generation, meeting, among(ranks), lane, timeout, make)
    return ConfirmedLink(link, _over_gloo(session, generation, f"{called}, confirmed", ranks, timeout, where))


LINKS: dict[str, Way] = {  # by kind of device
    HOST.type: Way(_over_gloo),
    NVIDIA: Way(partial(over_nccl, process_group), nccl_door.prepare, takes, partial(over_nccl, thin_group)),
}
MOVERS: dict[str, Callable[[Session, Device], Mover]] = {HOST.type: Transport}


def stays_there(session: Session, tensors: Sequence[torch.Tensor], op: ReduceOp | None) -> bool:
    """Whether a collective on ``tensors``, reducing by ``op`` if any, goes over a link of their device."""
    kind = tensors[0].device.type if tensors else HOST.type
    if session.device_link == THROUGH_HOST or kind == HOST.type or kind not in LINKS:
        return False
    where = device_of(torch.device(kind)).where  # this worker's own
    return all(
        one.device == where and one.layout is torch.strided and LINKS[kind].takes(one.dtype, op) for one in tensors
    )


def carry_on_device(session: Session, by: str, kind: str, environment: MutableMapping[str, str]) -> None:
    """Have collectives on devices of ``kind`` carried as the setting ``device_link``, ``by``, says; raises RecycleError
    if that is impossible.
    """
    if by != THROUGH_HOST:
        if kind == HOST.type or kind not in LINKS:
            raise RecycleError(
                f'recycle.device_link is "{by}", and this worker computes on {kind}: write "{THROUGH_HOST}"'
            )
        LINKS[kind].prepare(environment)
    session.device_link = by


def open_link(
    session: Session, generation: int, called: str, ranks: Sequence[int], timeout: timedelta, where: torch.device = HOST
) -> Link:
    """Open a link of ``generation`` among ``ranks`` for tensors at ``where``; ``called``: its name in the job."""
    return LINKS[where.type].open(session, generation, called, ranks, timeout, where)


def open_thin_link(
    session: Session, generation: int, called: str, ranks: Sequence[int], timeout: timedelta, where: torch.device
) -> Link:
    """Open a link for boundary tensors at ``where``; see :func:`open_link`."""
    way = LINKS[where.type]
    return (way.open_thin or way.open)(session, generation, called, ranks, timeout, where)


def open_mover(session: Session, device: Device) -> Mover:
    """Return the mover of boundary tensors on ``device``; with links of two beside TCP if ``device_link`` says so."""
    if session.device_link == THROUGH_HOST:
        return MOVERS.get(device.kind, Transport)(session, device)
    return LinkedPairs(session, Transport(session, device), open_thin_link, accelerator_at(device.where).lane())
