"""The notice that a host is about to be taken away, as clouds give it: a command of the user asks for it.

Every worker asks, so any of a host's workers may be dead. Once the command succeeds, all workers of the host leave as
planned (core/coordinator/operating.py). On the coordinator's host the job ends at the next commit instead, since it
can't go on without that host. The message is repeated until this process is gone: a worker that is just entering can't
leave yet, and none may be left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

from recycle_plugin.core.messages.from_workers import HostGoes
from recycle_plugin.runtime.control.session import Session

EVERY_S = 5.0  # s between two runs of the command, and two messages
ANSWER_S = 5.0  # how long the command may take
KILLED_S = 1.0  # how long it may take to end once killed
NEVER = (126, 127)  # a shell's exit codes if it finds no such command or may not run it


def watch(command: str, session: Session) -> None:
    """Run the shell ``command`` at intervals from now on, in a thread."""
    threading.Thread(target=_watch, args=(command, session), name="recycle: notices", daemon=True).start()


def _watch(command: str, session: Session) -> None:
    complained = False
    while (wrong := _asked(command)) is not None:
        if wrong and not complained:
            complained = True
            session.note("warning", f"recycle.leave_on on host {session.host}: {wrong}: {command}")
        time.sleep(EVERY_S)
    while True:
        if session.view.generation is not None:
            session.send(HostGoes(session.rank, f"recycle.leave_on ({command})", session.beside_coordinator))
        time.sleep(EVERY_S)


def _asked(command: str) -> str | None:
    """Return None if the command succeeds, what is wrong with it, or "" if it has just not succeeded."""
    try:
        asking = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:  # no memory or no process available now
        return str(error)
    try:
        code = asking.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        with suppress(OSError):  # a command such as sudo is another user's
            os.killpg(asking.pid, signal.SIGKILL)  # and all that the shell has started
        with suppress(subprocess.TimeoutExpired):
            asking.wait(KILLED_S)
        return f"no answer within {ANSWER_S:.0f} s"
    if code == 0:
        return None
    return f"the shell can't run it (exit code {code})" if code in NEVER else ""
