"""The connections of standbys (core/coordinator/mirror.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recycle_plugin.core.coordinator.mirror import Following, Known, Mirror
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.runtime.control.in_loop import InLoop

LISTEN_S = 60.0  # how long silence is normal


async def serve(mirror: Mirror, control: InLoop, hello: Hello) -> None:
    """Serve a standby, which has said ``hello``, until its connection breaks or the coordinator wants it no more."""
    there = control.there
    control.hold_all()  # the state may be long; a standby that takes nothing is let go soon
    follower = mirror.admit(control, hello, "" if there is None else there[0])
    if follower is None:
        return
    while (message := await control.receive(LISTEN_S)) is not None or control.broken is None:
        mirror.heard(follower, message)
    mirror.let_go(follower)


async def follow(control: InLoop, hello: Hello, learnt: Callable[[Known], Any]) -> bool:
    """Take in all that the coordinator behind ``control`` does, until it is gone. Return whether this process may ask
    again. ``learnt``: see :class:`Following`.
    """
    control.send(hello)
    following = Following(learnt)
    while control.broken is None:
        message = await control.receive(0.0)
        if message is None:  # all that has come is taken in
            if (answer := following.answer()) is not None:
                control.send(answer)
            message = await control.receive(LISTEN_S)
        if not following.hear(message):
            return False
    return True
