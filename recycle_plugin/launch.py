"""Starts a job, on one host by itself or as one process of DeepSpeed's launcher or of srun.

``python -m recycle_plugin.launch --workers N [--port PORT] [--no-fork] [--one-device] your_script.py …``: all of a
job on this host, without DeepSpeed (runtime/processes/one_host.py).  ``--no-fork``: workers import everything
themselves, instead of being forked from a process that has.  ``--one-device``: all of them compute on the host's first
accelerator, which is for tests; each is told that it is the first of its host, by LOCAL_RANK.

``deepspeed … --module recycle_plugin.launch your_script.py …``: the launcher's per-rank process; or srun's task,
``python -m recycle_plugin.launch``. DeepSpeed's launcher puts ``--local_rank=N`` before the script's name; it goes
behind it here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

CONFIG, DEFAULT = "--deepspeed_config", "deepspeed"
IMPORTED = [  # by the process that workers are forked from
    "recycle_plugin.adapters.deepspeed", "recycle_plugin.adapters.plain", "recycle_plugin.runtime.collectives.group",
    "torch._dynamo",  # which every optimizer of torch's imports when the first one is made
]  # fmt: skip
HERE = "python -m recycle_plugin.launch --workers 4 your_script.py"


class BadCommand(ValueError):
    """The command line makes no sense; the message says what to write instead."""


def script_command(arguments: list[str]) -> list[str]:
    """The script with its arguments, from what the launcher passes to this module."""
    ranks = [argument for argument in arguments if _is_rank(argument)]
    script = [argument for argument in arguments if argument not in ranks]
    return script[:1] + ranks + script[1:]


def _is_rank(argument: str) -> bool:
    return argument.startswith(("--local_rank", "--local-rank"))


def placement(command: list[str]) -> str:
    """The setting ``recycle.placement`` in the config file that the command line names.

    Ranks are given out before the script makes its config.  What is wrong in the section is said by the workers, who
    read all of it.
    """
    given = [
        argument.partition("=")[2] or following
        for argument, following in zip(command, [*command[1:], ""])
        if argument.split("=")[0] == CONFIG
    ]
    try:
        text = Path(given[-1]).read_text()
        if '"placement"' not in text:
            return DEFAULT
        # takes longer to import than all else that a supervisor needs
        from recycle_plugin.settings.schema import Settings
        from recycle_plugin.settings.wording import SECTION

        settings = Settings.from_section(json.loads(text).get(SECTION))
        return settings.placement if settings.enabled else DEFAULT
    except (IndexError, OSError, ValueError, AttributeError):
        return DEFAULT


# --- on one host ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneHost:
    """What the command line of a launcher for one host asks for; ``port`` None: a free one.

    ``one_device``: all workers compute on the first accelerator.
    """

    workers: int
    command: list[str]
    port: int | None = None
    fork: bool = True
    one_device: bool = False

    @classmethod
    def asked_for(cls, arguments: list[str]) -> OneHost:
        """Parse options, and the script with its arguments.  Raises BadCommand."""
        given, rest = {"--workers": None, "--port": None}, list(arguments)
        switches = {"--no-fork": False, "--one-device": False}
        while rest and rest[0].startswith("-"):
            option, joined, value = rest.pop(0).partition("=")
            if option in switches and not joined:
                switches[option] = True
            elif option not in given:
                raise BadCommand(
                    f"{option} is no option of the launcher: write those of your script behind it, and before it "
                    "--workers, --port, --no-fork or --one-device"
                )
            else:
                given[option] = value if joined else rest.pop(0) if rest else ""
        if given["--workers"] is None:
            raise BadCommand(f"how many workers? Write {HERE}")
        workers, port = _workers(given["--workers"]), None if given["--port"] is None else _port(given["--port"])
        if not rest:
            raise BadCommand(f"no training script given: write {HERE}")
        if not Path(rest[0]).exists():
            raise BadCommand(f"there is no {rest[0]}: write the path of your training script, {HERE}")
        if not (Path(rest[0]).is_file() or Path(rest[0], "__main__.py").is_file()):
            raise BadCommand(
                f"{rest[0]} is no file that each worker can read, nor a folder with a __main__.py: write the path of "
                f"your training script, {HERE}"
            )
        return cls(workers, rest, port, not switches["--no-fork"], switches["--one-device"])


def _workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise BadCommand(f"--workers {text}: write a whole number, 1 or more: {HERE}")
    return int(text)


def _port(text: str) -> int:
    advice = "or no --port at all for a free one"
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise BadCommand(f"--port {text}: write a number from 1 to 65535, {advice}")
    try:
        socket.create_server(("", int(text))).close()
    except OSError as error:
        raise BadCommand(
            f"port {text} cannot be used ({os.strerror(error.errno)}): write another --port, {advice}"
        ) from None
    return int(text)


def launch_here(arguments: list[str]) -> int:
    """Run a whole job on this host; returns its exit code.  Raises BadCommand."""
    from recycle_plugin.experiments.runs import free_port
    from recycle_plugin.runtime.processes import one_host

    asked = OneHost.asked_for(arguments)
    imports, port = IMPORTED if asked.fork else None, asked.port or free_port()
    way = placement(asked.command)
    return one_host.main(
        one_host.Launcher(asked.command, asked.workers, port, way, os.environ, imports, asked.one_device)
    )


def run(arguments: list[str]) -> int | str:
    """Run what the command line asks for; returns what to exit with."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    try:
        if arguments and arguments[0].startswith("-") and not _is_rank(arguments[0]):
            return launch_here(arguments)
    except BadCommand as error:
        return f"recycle: error: {error}"
    command = script_command(arguments)
    if not command or command[0].startswith("-"):
        return (
            "recycle: error: no training script given: deepspeed … --module recycle_plugin.launch your_script.py …, "
            f"or on one host {HERE}"
        )
    return guard(command)


def guard(command: list[str]) -> int | str:
    """Hold one rank's place until its worker and the job have ended (runtime/processes/guard.py); returns what to exit
    with.

    Whatever takes memory is imported in this process's children.
    """
    from recycle_plugin.runtime.processes.descriptors import TooFewDescriptors, provide
    from recycle_plugin.runtime.processes.guard import Guard
    from recycle_plugin.runtime.processes.slurm import NoPlace, described

    try:
        environment = described(os.environ)
        provide(int(environment["WORLD_SIZE"]))
    except NoPlace as error:
        return f"recycle: error: {error}"
    except TooFewDescriptors as error:  # which is so for all of this host
        return f"recycle: error: {error}" if environment.get("LOCAL_RANK", "0") == "0" else 1

    def supervise(line: socket.socket) -> int:
        from recycle_plugin.runtime.processes import supervisor

        return supervisor.supervise(command, environment, placement, line)

    def host(line: socket.socket) -> int:
        from recycle_plugin.runtime.processes import supervisor

        return supervisor.host(environment, line)

    return Guard(supervise, host if environment["RANK"] == "0" else None).hold()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
