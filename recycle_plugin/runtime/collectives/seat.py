"""The process group of the workers that hold one seat together, for layers that are split between them.

Between steps it is a group like any other. Inside F, I, B and STEP no other group may be used
(runtime/collectives/callers.py). This one may: its members start these together, and nothing elsewhere interrupts them
(core/worker/lockstep.py). Calls of layers and sharded replicas' steps there go over a link of their own, which no
membership change breaks. If a member dies, the others are given up with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from recycle_plugin.core.messages.activity import WAITS, Activity
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.asked import Asked
from recycle_plugin.runtime.collectives.in_flight import NEWS_TIMEOUT_S
from recycle_plugin.runtime.collectives.link import Broken, Link, among
from recycle_plugin.runtime.control import session
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import fetch, write


def seat_group() -> dist.ProcessGroup:
    """Return the group of this process's seat; see recycle_plugin.seat_group."""
    group = session.of_this_process().hooks.seat_group
    if group is None:
        raise RecycleError(
            "recycle_plugin.seat_group(): each worker of this job holds its seat alone; give Pipeline(shards=2), and "
            "call it in a layer, or in the function that makes one"
        )
    return group


class SeatLink:
    """The link among all ``ranks`` for calls inside layers; ``open(name)`` makes one."""

    def __init__(self, session: Session, ranks: tuple[int, ...], open: Callable[[str], Link]) -> None:
        self._session, self._ranks, self._open = session, ranks, open
        self._link: Link | None = None

    def run(self, asked: Asked) -> None:
        """Run a layer's call, and write the result to its tensors. If a connection breaks, another member is gone, and
        this worker is about to be ended. It waits for that, up to NEWS_TIMEOUT_S, then raises WaitTimeout. Raises any
        other error of the operation at once.
        """
        held = [fetch(tensor, "what goes to the other workers of its seat", shared=False) for tensor in asked.tensors]
        handle = self._connected().start(asked.make(held, {place: place for place in range(len(self._ranks))}))
        handle.when_over(self._session.waiting.wake)
        name = f"{asked.called} among {among(self._ranks)}, in a layer"
        wait = Activity(WAITS, name, ranks=tuple(self._ranks))
        self._session.waiting.until(wait, lambda: True if handle.poll() else None, interruptible=False)
        if isinstance(handle.error, Broken):
            what = f"news of a lost worker after {name} failed ({handle.error})"
            self._session.waiting.until(
                wait._replace(what=what), lambda: None, interruptible=False, timeout_s=NEWS_TIMEOUT_S
            )
        handle.wait(0)
        with torch.no_grad():
            for tensor, value in zip(asked.tensors, held) if asked.writes else ():
                if asked.adjust is not None:
                    asked.adjust(value, len(self._ranks))
                write(tensor, value, asked.called)

    def _connected(self) -> Link:
        """Return the link; the seat's present processes make it once."""
        if self._link is None:
            workers = [f"{one.rank}.{one.incarnation}" for one in self._session.view.roster.of_ranks(self._ranks)]
            self._link = self._open(f"seat of {' '.join(workers)}")
            self._link.connect()
        return self._link
