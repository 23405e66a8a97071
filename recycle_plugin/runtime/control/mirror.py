"""Processes that stand by (core/coordinator/mirror.py), over connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.core.coordinator.mirror import Following, Known, Mirror
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.runtime.control.in_loop import InLoop

LISTEN_S = 60.0  # how long nothing need be heard


async def serve(mirror: Mirror, control: InLoop, hello: Hello) -> None:
    """Serve a process that stands by, which says ``hello``, until its connection is broken, or nobody waits for it."""
    there = control.there
    follower = mirror.admit(control, hello, "" if there is None else there[0])
    if follower is None:
        return
    while (message := await control.receive(LISTEN_S)) is not None or control.broken is None:
        mirror.heard(follower, message)
    mirror.let_go(follower)


async def follow(control: InLoop, hello: Hello, learnt: Callable[[Known], Any]) -> bool:
    """Take in all that the coordinator at the other end of ``control`` does, until it is gone; ``learnt`` as for
    :class:`Following`.  Returns whether it may be asked again.
    """
    control.send(hello)
    following = Following(learnt)
    while control.broken is None:
        message = await control.receive(0.0)
        if message is None:  # it has all that has come
            if (answer := following.answer()) is not None:
                control.send(answer)
            message = await control.receive(LISTEN_S)
        if not following.hear(message):
            return False
    return True
