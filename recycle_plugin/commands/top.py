"""``recycle top``: a running job on one screen, read from its event log."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time

from recycle_plugin.commands.parsers import add_job, command, folder_of
from recycle_plugin.commands.status import ended_early
from recycle_plugin.observability.event_log import EventLog
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import end, exit_code, sentence
from recycle_plugin.observability.screen import printed, screen

DESCRIPTION = """\
Show a job on one screen, drawn anew every 2 s until it ends: step, loss, throughput, goodput, and each seat; of many
seats a grid of replicas and stages, a mark a seat, and a list of those that do not just train.  It reads what recycle
status reads, and takes the coordinator's address too.  If the output is no terminal, it prints one screen.

recycle top runs/train
recycle top runs/train --once

Exit code: 0 if the job came to its planned end, or with --once runs; 1 if it has ended otherwise; 2 for bad
input; 130 after Ctrl-C.
"""
EVERY_S = 2.0
PIPED = os.terminal_size((120, 200))  # size if the output is no terminal
BEGIN, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen without a cursor, and back
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K\r\n", "\x1b[J"


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "top", "a running job on one screen, drawn anew until it ends", DESCRIPTION, run)
    add_job(made)
    made.add_argument("--once", action="store_true", help="print one screen, and end")


def run(found: argparse.Namespace) -> int:
    """Draw the job until it ends, and return the exit code."""
    folder = folder_of(found.job)
    if early := ended_early(folder):
        print(early)
        return 1
    log = EventLog(folder, whole=False)
    if found.once or not sys.stdout.isatty():
        history = RunHistory(log.events())
        print("\n".join(printed(line, PIPED.columns) for line in screen(history, time.time(), PIPED)))
        return exit_code(history)
    history = _drawn(log)
    print(sentence(history))
    return exit_code(history)


def _drawn(log: EventLog) -> RunHistory:
    """Draw the job until it ends and return its history; the terminal is restored."""
    history = RunHistory(log.events())
    sys.stdout.write(BEGIN)
    try:
        while end(history) is None:
            size = shutil.get_terminal_size()
            lines = (printed(line, size.columns, coloured=True) for line in screen(history, time.time(), size))
            sys.stdout.write(f"{HOME}{END_OF_LINE.join(lines)}{END_OF_LINE.rstrip()}{END_OF_SCREEN}")
            sys.stdout.flush()
            time.sleep(EVERY_S)
            history = RunHistory(log.events())
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
    return history
