"""A member of a group over NCCL: ``link_worker.py KIND POSITION MEMBERS PORT``; the last member is killed.

It prints a line of JSON for each trial: its name, what was wrong, and milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from recycle_plugin.runtime.collectives import nccl_door
from recycle_plugin.runtime.collectives.link import AllReduce, Broken, Handle
from recycle_plugin.runtime.collectives.nccl import Meeting, NcclLink, process_group
from recycle_plugin.runtime.devices.kinds import accelerator_at

NUMBERS, STUCK, WAIT_S = 1 << 22, 4, 25.0
HERE = "member {}"  # NCCL's own keys are plain numbers
CALLS = 2.5  # time limits of a blocking call until the last member comes
SETTLE_S = 0.3  # until a launched sum is surely stuck on a device


class StoreMeeting(Meeting):
    """Members meet at a store that outlives killed processes."""

    def __init__(self, store: dist.Store, called: str, ranks: Sequence[int], rank: int) -> None:
        dist.Store.__init__(self)
        self.store, self.ranks = dist.PrefixStore(called, store), tuple(ranks)
        self.position, self.wanted = self.ranks.index(rank), lambda: True

    def come(self, timeout: timedelta) -> None:
        """Record that this member is there, and return once all are."""
        self.store.set(HERE.format(self.position), "")
        self.store.wait([HERE.format(place) for place in range(len(self.ranks))], timeout)

    def missing(self) -> list[int]:
        """Name no member."""
        return []

    def close(self) -> None:
        """Leave the store as it is."""


class LinkMember:
    """One of ``members`` at a store on this host."""

    def __init__(self, kind: str, rank: int, members: int, port: int) -> None:
        self.rank, self.members, self.limit = rank, members, timedelta(seconds=WAIT_S)
        self.where = torch.device(kind, 0)
        self._store = dist.TCPStore("127.0.0.1", port, None, False, self.limit, wait_for_workers=False)

    def link(self, name: str, members: int, connected: bool = True) -> NcclLink:
        """Return a link of the first ``members``, connected unless ``connected`` is False."""
        meeting = StoreMeeting(self._store, name, range(members), self.rank)
        made = NcclLink(1, meeting, name, accelerator_at(self.where).lane(), self.limit, partial(_made, meeting.store))
        if connected:
            made.connect().wait(WAIT_S)
        return made

    def begin(self, link: NcclLink) -> tuple[torch.Tensor, Handle]:
        """Start a sum of all members' ranks, counted from 1."""
        total = torch.full((NUMBERS,), self.rank + 1.0, device=self.where)
        return total, link.start(AllReduce([total], ReduceOp(ReduceOp.SUM)))

    def sum(self, link: NcclLink, members: int) -> str:
        """Return what was wrong with a sum, or ""."""
        total, handle = self.begin(link)
        handle.wait(WAIT_S)
        return _judged(total, float(sum(range(1, members + 1))))

    def meet(self, word: str, members: int) -> None:
        """Wait for the first ``members``."""
        self._store.set(f"{word} {self.rank}", "")
        self._store.wait([f"{word} {rank}" for rank in range(members)], self.limit)


def _made(store: dist.Store, _: dist.Store, position: int, members: int, timeout: timedelta) -> Any:
    return process_group(store, position, members, timeout)


def _judged(total: torch.Tensor, expected: float) -> str:
    least, most = total.min().item(), total.max().item()
    return "" if least == most == expected else f"from {least:g} to {most:g} in place of {expected:g}"


def tried(name: str, work: Callable[[], str]) -> None:
    """Try ``work``, and print its result and duration."""
    began = time.perf_counter()
    try:
        wrong = work()
    except Exception as error:
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())}"
    ms = round(1e3 * (time.perf_counter() - began))
    print(json.dumps({"name": name, "wrong": wrong, "ms": ms}), flush=True)


def ended(links: Sequence[NcclLink], handles: Sequence[Handle]) -> str:
    """Abort links whose sums are stuck. Every sum must break; return what was wrong, or ""."""
    for down in [link.abort() for link in links]:
        down.wait(WAIT_S)
    for handle in handles:
        try:
            handle.wait(0)
        except Broken:
            continue
        return "a sum that was aborted counts"
    return ""


def main() -> None:
    """Try sums, a member's death in one, a new group, several stuck groups, and first calls that block."""
    kind, rank, members, port = sys.argv[1], *map(int, sys.argv[2:5])
    nccl_door.prepare(os.environ)
    member, left = LinkMember(kind, rank, members, port), members - 1
    link = member.link("all", members)
    tried("a sum", lambda: member.sum(link, members))
    member.meet("summed", members)
    if rank == left:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait(SETTLE_S)
    # Only one member begins a sum: an abort may complete another member's kernel with garbage
    # (runtime/collectives/confirmed.py).
    stuck = [member.begin(link)[1]] if rank == 0 else []
    threading.Event().wait(SETTLE_S)
    tried("abort beside the dead", lambda: ended([link], stuck))
    tried("a new group and its sum", lambda: member.sum(member.link("left", left), left))
    links = [member.link(f"stuck {number}", left) for number in range(STUCK)]
    member.meet("linked", left)
    handles = [member.begin(each)[1] for each in links] if rank == 0 else []
    threading.Event().wait(SETTLE_S)
    tried(f"abort of {STUCK} at once", lambda: ended(links, handles))
    member.meet("aborted", left)
    if rank == 0:
        tried("abort of a first call that blocks", lambda: never_made(member))
    member.meet("slow", left)
    slow = member.link("slow", left, connected=False)
    if rank > 0:
        slow._meeting.come(member.limit)
        threading.Event().wait(CALLS * float(os.environ[nccl_door.LIMIT]))
    tried("a group whose last member comes late", lambda: member.sum(slow, left))
    member.meet("end", left)
    sys.stdout.flush()
    os._exit(0)  # a stuck thread could keep the process


def never_made(member: LinkMember) -> str:
    """Abort a connection whose other member says that it is there but makes no group; return what was wrong, or ""."""
    meeting = StoreMeeting(member._store, "never", range(2), 0)
    meeting.store.set(HERE.format(1), "")
    lane = accelerator_at(member.where).lane()
    link = NcclLink(1, meeting, "never", lane, member.limit, partial(_made, meeting.store))
    connecting = link.connect()
    threading.Event().wait(SETTLE_S)
    return ended([link], [connecting])


if __name__ == "__main__":
    main()
