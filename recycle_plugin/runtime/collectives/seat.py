"""The process group of the workers that hold one seat together, for layers of which each of them has a part.

Between steps it is a group like any other.  Inside of F, I, B and STEP, where no other group may be used
(runtime/collectives/callers.py), its members are always there: they begin these together, and nothing that happens
elsewhere interrupts them (core/worker/lockstep.py).  So what layers, and the steps of sharded replicas, ask for there
goes over a link of its own, which no change of the membership breaks; where a member dies, the others are given up with
it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.asked import Asked
from recycle_plugin.runtime.collectives.in_flight import NEWS_TIMEOUT_S
from recycle_plugin.runtime.collectives.link import Link
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.host import on_host
from recycle_plugin.runtime.devices.kinds import fetch, write


def seat_group() -> dist.ProcessGroup:
    """The group of this process's seat; see recycle_plugin.seat_group."""
    group = session.of_this_process().hooks.seat_group
    if group is None:
        raise RecycleError(
            "recycle_plugin.seat_group(): each worker of this job holds its seat alone; give Pipeline(shards=2), and "
            "call it in a layer, or in the function that makes one"
        )
    return group


class SeatLink:
    """The link among all of ``ranks``, as what is ``asked`` for inside of a layer; ``open`` makes one of a given
    name.
    """

    def __init__(self, session: Session, ranks: tuple[int, ...], open: Callable[[str], Link]) -> None:
        self._session, self._ranks, self._open = session, ranks, open
        self._link: Link | None = None

    def run(self, asked: Asked) -> None:
        """Do what a layer asks for, and write the result to its tensors.

        Raises its error; where another member is gone this one is about to be ended, and waits for that.
        """
        held = [_copy(tensor) for tensor in asked.tensors]
        handle = self._connected().start(asked.make(held, {place: place for place in range(len(self._ranks))}))
        handle.when_over(self._wake)
        name = f"{asked.called} among ranks {', '.join(map(str, self._ranks))}, in a layer"
        self._session.waiting.until(name, lambda: True if handle.poll() else None, interruptible=False)
        if handle.error is not None:
            what = f"news of a lost worker after {name} failed ({handle.error})"
            self._session.waiting.until(what, lambda: None, interruptible=False, timeout_s=NEWS_TIMEOUT_S)
        with torch.no_grad():
            for tensor, value in zip(asked.tensors, held) if asked.writes else ():
                if asked.adjust is not None:
                    asked.adjust(value, len(self._ranks))
                write(tensor, value, asked.called)

    def _connected(self) -> Link:
        """The link, which the processes that hold the seat now make once."""
        if self._link is None:
            workers = [f"{one.rank}.{one.incarnation}" for one in self._session.view.roster.of_ranks(self._ranks)]
            self._link = self._open(f"seat of {' '.join(workers)}")
            self._link.connect()
        return self._link

    def _wake(self) -> None:
        with self._session.waiting.changed:
            self._session.waiting.changed.notify_all()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if not on_host(tensor):
        return fetch(tensor, "what goes to the other workers of its seat")
    return tensor.detach().clone(memory_format=torch.contiguous_format)
