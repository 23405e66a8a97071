"""The process that trains: it connects to the coordinator, then runs the user's script as ``__main__``.

Its supervisor starts it and outlives it. An error that fits in one line is reported once, by the coordinator, for all
workers.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from recycle_plugin.adapters import unused
from recycle_plugin.adapters.deepspeed import Plugin
from recycle_plugin.adapters.megatron_lm import entry as megatron_lm
from recycle_plugin.core.messages.from_workers import Crashed, Fatal
from recycle_plugin.core.vocabulary.iterator_draws import Gone
from recycle_plugin.core.vocabulary.recovery_plan import Torn
from recycle_plugin.core.worker.control_view import JobEnded
from recycle_plugin.core.worker.loop_ports import LEAVE
from recycle_plugin.errors import CantJoin, CutOff, RecycleError, Refused
from recycle_plugin.planner import PlanError
from recycle_plugin.runtime.control.session import Session, connect_from_environment
from recycle_plugin.runtime.processes import signal_info
from recycle_plugin.runtime.processes.process_end import flush, leave_process
from recycle_plugin.runtime.processes.spawn import die_with_parent
from recycle_plugin.runtime.system import forked
from recycle_plugin.runtime.system.unread import outlive_readers
from recycle_plugin.settings.wording import SettingsError

GIVEN_UP = 3  # exit code
FOREIGN = {
    os.path.realpath(path)
    for path in (os.path.dirname(__file__), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
}
LOOK_S = 0.1  # interval of checks whether a newcomer is a member
LINE, TRACE = 300, 20_000  # most characters of an error's line, and of its traceback


def main(command: list[str]) -> int:
    """Run the script as a worker of the job, and return the exit code."""
    die_with_parent()  # an orphan would not be watched
    outlive_readers()
    signal_info.unblock()
    try:
        session = connect_from_environment(dict(os.environ), _end_early)
    except (RecycleError, ConnectionError) as error:
        _say(f"recycle: error: {error}")
        return 1
    session.given_up = functools.partial(_end_given_up, session)
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: _ask_to_leave(session, leave))
    signal.signal(signal.SIGINT, lambda *_: _interrupt(session))
    forked.register(session.cut_off)
    os._exit = functools.partial(_exit, session, os._exit)  # type: ignore[assignment]
    Plugin(session).install()
    unused.watch(session)
    try:
        code = run_script(megatron_lm.install(session, command))
        if code == 0 and not session.forked:
            session.hooks.through()
            session.hooks.at_end()
            session.leave()
        if code and not session.forked:
            _say_end(session, Crashed(session.rank, f"exit code {code}", step=session.view.begun))
        return code
    except JobEnded as end:
        if not end.failed:
            session.hooks.at_end()
        if session.coordinator_is_gone:
            _say(f"recycle: the job ends: {end}")
        session.leave(end.code, planned=str(end) == LEAVE)
        return end.code
    except CutOff as error:
        _say(f"recycle: error: {error}")
        return error.code
    except (RecycleError, Refused, SettingsError, PlanError, Torn, Gone) as error:
        if os.environ.get("RECYCLE_TRACEBACK"):
            traceback.print_exc()
        if session.forked:
            _say(f"recycle: error: {error}")
        else:
            _say_end(session, Fatal(session.rank, str(error)), isinstance(error, (CantJoin, Refused)))
        return 1
    except KeyboardInterrupt:  # before training, when the supervisors have got it too
        if session.forked:
            raise
        return 128 + signal.SIGINT
    except Exception as error:
        if session.forked or session.coordinator_is_gone:
            raise
        _say_end(session, replace(crash(session.rank, error), step=session.view.begun))
        return 1


def _exit(session: Session, leave: Callable[[int], NoReturn], code: int) -> NoReturn:
    """Exit as the script does; 0 between two steps may be its end or not (core/coordinator/vanishing.py)."""
    if code == 0 and not session.forked and session.between_two_steps:
        with suppress(Exception, JobEnded):  # the script must end, whatever is wrong
            session.hooks.at_end()
            session.vanish()
    leave(code)


def _say_end(session: Session, why: Fatal | Crashed, alone: bool = False) -> None:
    """Report the error that ends the script to the coordinator. It is only a warning if no other worker is affected: a
    newcomer that is not a member yet or not at its first step, or that has nothing to go on with (``alone``).
    """
    startup = session.hooks.startup
    if alone or session.view.outside or (startup is not None and startup.alone):
        text = why.text if isinstance(why, Fatal) else f"its script has ended with {why.error}"
        session.note("warning", f"rank {session.rank}, which has come back, can't take part: {text}")
    else:
        session.send(why)


def run_script(command: list[str]) -> int:
    """Run ``command[0]`` as ``__main__`` with the rest as its arguments, and return its exit code. The text of
    ``sys.exit("…")`` becomes a RecycleError: an error of all workers that is reported once.
    """
    sys.argv = command
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, str):
            raise RecycleError(ending.code) from None
        return ending.code or 0
    return 0


def crash(rank: int, error: Exception) -> Crashed:
    """Return the message to the coordinator on a script that ended with ``error``. It names the innermost line outside
    libraries and this package.
    """
    frames = error.__traceback__
    while frames is not None and _foreign(frames.tb_frame.f_code.co_filename):  # the frames that ran the script
        frames = frames.tb_next
    places = [
        f" at {each.filename}:{each.lineno}" for each in traceback.extract_tb(frames) if not _foreign(each.filename)
    ]
    text = str(error).strip()
    first = text.partition("\n")[0][:LINE]
    line = f"{type(error).__name__}: {first}" if text else type(error).__name__
    whole = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    return Crashed(rank, line + " …" * (first != text) + "".join(places[-1:]), whole[-TRACE:])


def _foreign(file: str) -> bool:
    return file.startswith("<") or any(os.path.realpath(file).startswith(f"{folder}{os.sep}") for folder in FOREIGN)


def _end_early(session: Session) -> None:
    """Leave the process: the job has failed before its first step. The script may be in a wait that ignores
    signals.
    """
    assert session.view.end is not None, "the job has failed"
    if session.coordinator_is_gone:  # nobody else can say so, or hears a goodbye
        _say(f"recycle: the job ends: {session.view.end.reason}")
    else:
        if session.view.incarnation:  # the job's output does not reach the reader of a process that came later
            _say(f"recycle: error: {session.view.end.reason}")
        session.leave()
    flush()
    os._exit(1)


def _end_given_up(session: Session, reason: str) -> None:
    """Leave the process: the others go on without this worker. Whatever the main thread does must stop: no checkpoint
    that the others don't know, no message.
    """
    _say(f"recycle: {session.view} was given up ({reason}), and the others go on without it: its process ends")
    os._exit(GIVEN_UP)


def _ask_to_leave(session: Session, asked: threading.Event) -> None:
    """Handle SIGTERM: a planned leave. Before the first step there is nothing to leave, and nobody counts on a newcomer
    that has not yet asked to be let in: the process just ends.
    """
    if session.view.generation is None and not session.view.asks_in:
        os._exit(128 + signal.SIGTERM)
    if not asked.is_set():
        asked.set()
        threading.Thread(target=_leave_once_member, args=(session,), daemon=True).start()


def _leave_once_member(session: Session) -> None:
    """Ask for the leave once this worker is a member, since a newcomer may just be let in. Ends with the process."""
    with session.waiting.changed:
        while session.view.generation is None:
            session.waiting.changed.wait(LOOK_S)
    session.ask_to_leave("its worker got SIGTERM")


def _interrupt(session: Session) -> None:
    """Handle Ctrl-C, which reaches all processes of the terminal; in training supervisors end the job at a commit."""
    if session.view.generation is None:
        raise KeyboardInterrupt


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # on a full disk, or closed by the script
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    leave_process(code)
