"""``recycle leave``, ``drain`` and ``admit``: change the membership of a running job from another terminal."""

from __future__ import annotations

import argparse

from recycle_plugin.commands.parsers import command, folder_of
from recycle_plugin.commands.running_job import ask
from recycle_plugin.core.messages.from_operators import Ask, AskAdmit, AskDrain, AskLeave

LEAVE = """\
Ask that the worker of a seat leaves as planned: it goes at a commit, nothing is lost, and nothing is computed twice.
The others go on without it, and no worker takes its seat until recycle admit asks for that.  This never ends the job:
it is refused if a stage would have no worker left.

recycle leave 1.1 --run runs/train
"""
DRAIN = """\
Ask that the workers of all seats on a host leave as planned, and that none is started there any more, so that the host
can be taken away.  All of them leave, or none if a stage would have no worker left.  Once they have left, SIGTERM to
the launcher's process there ends only that process; on the coordinator's host it ends the job.

recycle drain node7 --run runs/train
"""
ADMIT = """\
Ask for a new worker in a seat that has left as planned, or was given up because its newcomers kept dying.  A spare
takes it, if there is one, else its own supervisor starts the next process.  If its host is gone too, the next process
started with --join takes it.

recycle admit 1.1 --run runs/train
"""
CODES = "Exit code: 0 if the job has taken the request, 1 if it refuses, with the reason; 2 for a wrong command."


def add(commands: argparse._SubParsersAction) -> None:
    for name, what, help_, description, make in (
        ("leave", "SEAT", "a seat's worker leaves a running job as planned", LEAVE, AskLeave),
        ("drain", "HOST", "all workers of a host leave a running job as planned", DRAIN, AskDrain),
        ("admit", "SEAT", "a seat that has left a running job, or was given up, gets a new worker", ADMIT, AskAdmit),
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
