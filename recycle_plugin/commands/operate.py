"""``recycle leave``, ``drain`` and ``admit``: change the membership of a running job from another terminal."""

from __future__ import annotations

import argparse

from recycle_plugin.commands.parsers import command, folder_of
from recycle_plugin.commands.running_job import ask
from recycle_plugin.core.messages.from_operators import Ask, AskAdmit, AskDrain, AskLeave

LEAVE = """\
Ask that the worker of a seat leaves as planned: it goes at a commit, nothing is lost, and nothing is computed twice.
The others go on without it, and nobody takes its seat until recycle admit asks for that.  The job never ends by this:
it is refused where a stage would have nobody left.

recycle leave 1.1 --run runs/train
"""
DRAIN = """\
Ask that the workers of all seats on a host leave as planned, and that nobody is started there any more, so that the
host can be taken away.  All of them leave, or where a stage would have nobody left, none.  Once they have left, SIGTERM
to the launcher's process there ends only that; but the coordinator's host is the job's.

recycle drain node7 --run runs/train
"""
ADMIT = """\
Ask that somebody holds a seat again, which has left as planned, or was given up since its newcomers kept dying.  A
spare takes it, if there is one, else its own supervisor starts the next process.  Where its host is gone too, the next
one takes it that is started with --join.

recycle admit 1.1 --run runs/train
"""
CODES = "Exit code: 0 once it is asked for, 1 where that can't be, with the reason; 2 for a wrong command."


def add(commands: argparse._SubParsersAction) -> None:
    for name, what, help_, description, make in (
        ("leave", "SEAT", "a seat's worker leaves a running job as planned", LEAVE, AskLeave),
        ("drain", "HOST", "all workers of a host leave a running job as planned", DRAIN, AskDrain),
        ("admit", "SEAT", "a seat that has left a running job, or was given up, is held again", ADMIT, AskAdmit),
    ):
        made = command(commands, name, help_, f"{description}\n{CODES}", run)
        made.add_argument("what", metavar=what, help="as recycle status names it")
        made.add_argument(
            "--run",
            dest="job",
            metavar="RUN_DIR|ADDRESS",
            required=True,
            help="the job's run folder, or host and port of its coordinator; only the job's own user can ask",
        )
        made.set_defaults(make=make)


def run(found: argparse.Namespace) -> int:
    """Send the request to the job, print its answer, and return the exit code."""
    make: type[Ask] = found.make
    said = ask(folder_of(found.job), make, found.what)
    print(said.text)
    return 0 if said.done else 1
