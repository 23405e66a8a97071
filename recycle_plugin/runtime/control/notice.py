"""The notice that a host is about to be taken away, as clouds give it: asked for by a command of the user's.

Each worker asks, so that it does not matter which of a host's workers are alive.  Once the command succeeds, all
workers of the host leave as planned (core/coordinator/operating.py); on the coordinator's host the job ends at the next
commit instead, since it can't go on without.  The word is said again and again until this process is gone: a worker
that is just being let in can't leave yet, and nobody is to be left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

from recycle_plugin.core.messages.from_workers import HostGoes
from recycle_plugin.runtime.control.session import Session

EVERY_S = 5.0  # between two questions, and two words
ANSWER_S = 5.0  # how long the command may take
NEVER = (126, 127)  # what a shell ends with that finds no such command, or may not run it


def watch(command: str, session: Session) -> None:
    """Ask by ``command``, for a shell, from now on, in a thread of its own."""
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
    """None if the command succeeds; else what is wrong with it, or "" where it has just not succeeded."""
    try:
        asking = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:  # no memory, or no process, just now
        return str(error)
    try:
        code = asking.wait(ANSWER_S)
    except subprocess.TimeoutExpired:
        os.killpg(asking.pid, signal.SIGKILL)  # with what the shell has started
        asking.wait()
        return f"no answer within {ANSWER_S:.0f} s"
    if code == 0:
        return None
    return f"the shell can't run it (exit code {code})" if code in NEVER else ""
