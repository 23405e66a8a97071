"""Start a job, on one host by itself or as one process of DeepSpeed's launcher or of srun.

``python -m recycle_plugin.launch --workers N [--port PORT] [--no-fork] [--one-device] your_script.py …``: a whole job
on this host, without DeepSpeed (runtime/processes/one_host.py).  ``--no-fork``: workers import everything themselves,
instead of being forked from a process that has.  ``--one-device``: all workers compute on the host's first accelerator,
for tests; LOCAL_RANK tells each that it is the first of its host.

``deepspeed … --module recycle_plugin.launch your_script.py …``: one rank's process under DeepSpeed's launcher; likewise
under torchrun or accelerate launch (``-m recycle_plugin.launch``), and under srun or mpirun (``python -m
recycle_plugin.launch``).  DeepSpeed's launcher puts ``--local_rank=N`` before the script's name; it is moved behind it.

``… recycle_plugin.launch --join ADDRESS [--no-wait] your_script.py …``, by itself or under one of these launchers, on
any host: take the seat of a lost worker in the running job whose master is at ADDRESS (host and port, as
``node1:29500``).  If no seat is free, it waits as a spare and takes the next lost worker's seat; with ``--no-wait`` it
ends instead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from recycle_plugin.runtime.processes import variables
from recycle_plugin.runtime.processes.launchers import local_rank

CONFIG, DEFAULT = "--deepspeed_config", "deepspeed"
IMPORTED = [  # imported by the process from which workers are forked
    "recycle_plugin.adapters.deepspeed", "recycle_plugin.adapters.plain", "recycle_plugin.runtime.collectives.group",
    "torch._dynamo",  # every optimizer of torch's imports it when the first one is made
]  # fmt: skip
JOIN, NO_WAIT = "--join", "--no-wait"
JOIN_EXAMPLE = "python -m recycle_plugin.launch --join node1:29500 your_script.py"
HERE = "python -m recycle_plugin.launch --workers 4 your_script.py"


class BadCommand(ValueError):
    """The command line makes no sense; the message says what to write instead."""


def script_command(arguments: list[str]) -> list[str]:
    """Return the script with its arguments, from the arguments that the launcher passes to this module."""
    ranks = [argument for argument in arguments if _is_rank(argument)]
    script = [argument for argument in arguments if argument not in ranks]
    return script[:1] + ranks + script[1:]


def _is_rank(argument: str) -> bool:
    return argument.startswith(("--local_rank", "--local-rank"))


def _config(command: list[str]) -> str:
    """Return the text of the config file that the command line names. Raises IndexError if it names none, OSError, or
    ValueError if the file is no text.
    """
    given = [
        argument.partition("=")[2] or following
        for argument, following in zip(command, [*command[1:], ""])
        if argument.split("=")[0] == CONFIG
    ]
    return Path(given[-1]).read_text()


def _section(command: list[str], *settings: str) -> dict[str, Any]:
    """Return the section of the config file that the command line names, which is needed before the script makes its
    config; {} if it can't be read or has none of ``settings``. Errors in it are reported by the workers.
    """
    try:
        text = _config(command)
        if not any(f'"{name}"' in text for name in settings):
            return {}
        from recycle_plugin.settings.wording import SECTION  # slow to import

        found = json.loads(text).get(SECTION)
    except (IndexError, OSError, ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def placement(command: list[str]) -> str:
    """Return the setting ``recycle.placement`` of the config file that the command line names."""
    if not (section := _section(command, "placement")):
        return DEFAULT
    # slower to import than everything else that a supervisor needs
    from recycle_plugin.settings.schema import Settings

    try:
        settings = Settings.from_section(section)
    except ValueError:
        return DEFAULT
    return settings.placement if settings.enabled else DEFAULT


def with_credentials(environment: Mapping[str, str], command: list[str], joins: bool = False) -> dict[str, str]:
    """Return the environment with the credentials that the config file of the command line names.

    These are the path of the job's secret (secret_file in authentication/secret.py), and the folder of its TLS. On
    several hosts the secret may be in the run folder, where a process that ``joins`` finds it.
    """
    from recycle_plugin.authentication import tls as of_tls
    from recycle_plugin.authentication.secret import SETTING

    ranks = int(environment.get("WORLD_SIZE", "1"))
    several = joins or ranks > int(environment.get("LOCAL_SIZE", ranks))
    section = _section(command, "secret_file", "tls", *["run_dir"] * several)
    named, folder, tls = section.get("secret_file"), section.get("run_dir"), section.get("tls")
    shared = Path(os.path.expanduser(str(folder)), "secret")
    if not named and folder and several and (shared.exists() or not joins):
        named = shared
        with suppress(OSError):  # an error is reported when the secret is written
            shared.parent.mkdir(parents=True, exist_ok=True)
    found = {SETTING: named, of_tls.SETTING: tls}
    return {name: str(path) for name, path in found.items() if path} | dict(environment)


def with_link(environment: Mapping[str, str], command: list[str]) -> dict[str, str]:
    """Return the environment with CUDA's start-up variables if the config asks for NCCL; the user's own stay."""
    if _section(command, "device_link").get("device_link") != "nccl":
        return dict(environment)
    from recycle_plugin.runtime.collectives.nccl_door import at_start

    return dict(environment) | at_start(environment)


# --- on one host ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneHost:
    """Arguments of a launcher for one host; ``port`` None: a free one; ``one_device``: share the first accelerator."""

    workers: int
    command: list[str]
    port: int | None = None
    fork: bool = True
    one_device: bool = False

    @classmethod
    def asked_for(cls, arguments: list[str]) -> OneHost:
        """Parse the options, and the script with its arguments. Raises BadCommand."""
        advice = (
            "is no option of the launcher: write those of your script behind it, and before it --workers, --port, "
            "--no-fork or --one-device"
        )
        given, on, rest = _options(arguments, ("--workers", "--port"), ("--no-fork", "--one-device"), advice)
        workers, port = given.get("--workers"), given.get("--port")
        if workers is None:
            raise BadCommand(f"how many workers? Write {HERE}")
        if not workers.isdecimal() or int(workers) < 1:
            raise BadCommand(f"--workers {workers}: write a whole number, 1 or more: {HERE}")
        at = None if port is None else _port(port)
        _check_script(rest, HERE)
        return cls(int(workers), rest, at, "--no-fork" not in on, "--one-device" in on)


def _options(
    arguments: list[str], valued: Collection[str], switches: Collection[str], advice: str
) -> tuple[dict[str, str], set[str], list[str]]:
    """Return the options before a script with their values, the switches that are on, and the remaining arguments.
    Raises BadCommand with ``advice`` for any other option.
    """
    given, on, rest = dict[str, str](), set[str](), list(arguments)
    while rest and rest[0].startswith("-"):
        option, joined, value = rest.pop(0).partition("=")
        if option in switches and not joined:
            on.add(option)
        elif option in valued:
            given[option] = value if joined else rest.pop(0) if rest else ""
        else:
            raise BadCommand(f"{option} {advice}")
    return given, on, rest


def _check_script(command: list[str], example: str) -> None:
    """Raise BadCommand if ``command`` does not begin with a script; ``example``: a correct command line."""
    if not command:
        raise BadCommand(f"no training script given: write {example}")
    if not Path(command[0]).exists():
        raise BadCommand(f"there is no {command[0]}: write the path of your training script, {example}")
    if not (Path(command[0]).is_file() or Path(command[0], "__main__.py").is_file()):
        raise BadCommand(
            f"{command[0]} is no file that each worker can read, nor a folder with a __main__.py: write the path of "
            f"your training script, {example}"
        )


def _port(text: str) -> int:
    advice = "or no --port at all for a free one"
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise BadCommand(f"--port {text}: write a number from 1 to 65535, {advice}")
    try:
        socket.create_server(("", int(text))).close()
    except OSError as error:
        raise BadCommand(
            f"port {text} cannot be used ({os.strerror(error.errno or 0)}): write another --port, {advice}"
        ) from None
    return int(text)


def free_port() -> int:
    """Return a port between 20000 and 32000 that is free at the moment. Raises RuntimeError. Systems hand out higher
    ports, so no other process gets it by chance before it is used.
    """
    for port in Random().sample(range(20_000, 32_000), 100):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:  # taken
            continue
    raise RuntimeError("none of 100 ports between 20000 and 32000 is free")


def launch_here(arguments: list[str]) -> int:
    """Run a whole job on this host and return its exit code. Raises BadCommand."""
    from recycle_plugin.runtime.processes import one_host

    asked = OneHost.asked_for(arguments)
    imports, port = IMPORTED if asked.fork else None, asked.port or free_port()
    way = placement(asked.command)
    return one_host.main(
        one_host.Launcher(
            asked.command,
            asked.workers,
            port,
            way,
            with_link(with_credentials(os.environ, asked.command), asked.command),
            imports,
            asked.one_device,
        )
    )


# --- a seat that was lost -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Arguments for a lost worker's seat in the job with this master; ``waits``: as a spare, if no seat is free."""

    host: str
    port: int
    waits: bool
    command: list[str]

    @classmethod
    def asked_for(cls, arguments: list[str]) -> Join | None:
        """Parse options and script, also behind a launcher's --local_rank; None without --join. Raises BadCommand."""
        ranks = [argument for argument in arguments if _is_rank(argument)]
        rest = [argument for argument in arguments if argument not in ranks]
        if not rest or rest[0].partition("=")[0] not in (JOIN, NO_WAIT):
            return None
        given, on, rest = _options(rest, (JOIN,), (NO_WAIT,), f"does not go with {JOIN}: write {JOIN_EXAMPLE}")
        address = given.get(JOIN, "")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise BadCommand(f"{JOIN} {address}: write the address and port of the job's master, {JOIN_EXAMPLE}")
        _check_script(rest, JOIN_EXAMPLE)
        return cls(host, int(port), NO_WAIT not in on, script_command(ranks + rest))

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the worker's environment without rank and size; a launcher's variables give the local rank."""
        theirs = {"RANK", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"}
        return {name: value for name, value in own.items() if name not in theirs} | {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "LOCAL_RANK": local_rank(own),
        }


def run(arguments: list[str]) -> int | str:
    """Run what the command line asks for, and return the value to exit with."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    # speaks for all ranks of this host
    first = local_rank(os.environ) == "0"
    try:
        if (unknown := variables.check(os.environ)) and first:
            print(f"recycle: warning: {unknown}", file=sys.stderr, flush=True)
        if (asked := Join.asked_for(arguments)) is not None:
            return guard(asked.command, asked.environment(os.environ), asked.waits)
        if arguments and arguments[0].startswith("-") and not _is_rank(arguments[0]):
            return launch_here(arguments)
    except variables.Misspelt as error:
        return f"recycle: error: {error}" if first else 1
    except BadCommand as error:
        return f"recycle: error: {error}"
    command = script_command(arguments)
    if not command or command[0].startswith("-"):
        return (
            "recycle: error: no training script given: deepspeed … --module recycle_plugin.launch your_script.py …, "
            f"or on one host {HERE}"
        )
    return guard(command)


def guard(command: list[str], environment: Mapping[str, str] | None = None, joins: bool | None = None) -> int | str:
    """Hold one rank's place until its worker and the job have ended (runtime/processes/guard.py).

    ``environment``: of a worker without a rank; ``joins``: whether it waits for a seat. Returns the value to exit with.
    Imports that take memory happen in this process's children.
    """
    from recycle_plugin.runtime.processes.descriptors import TooFewDescriptors, provide
    from recycle_plugin.runtime.processes.guard import Guard
    from recycle_plugin.runtime.processes.launchers import NoPlace, described
    from recycle_plugin.runtime.system.unread import outlive_readers

    try:
        place = described(os.environ) if environment is None else dict(environment)
        provide(int(place.get("WORLD_SIZE", "1")))  # a newcomer does not know the number of ranks
    except NoPlace as error:
        return f"recycle: error: {error}" if local_rank(os.environ) == "0" else 1
    except TooFewDescriptors as error:  # holds for all ranks of this host
        return f"recycle: error: {error}" if place.get("LOCAL_RANK", "0") == "0" else 1

    def supervise(line: socket.socket) -> int:
        from recycle_plugin.runtime.processes import supervisor

        described = with_link(with_credentials(place, command, joins is not None), command)
        return supervisor.supervise(command, described, placement, joins, line)

    def host(line: socket.socket) -> int:
        from recycle_plugin.runtime.processes import hosted

        return hosted.host(with_credentials(place, command), line)

    def stand_by(line: socket.socket, address: tuple[str, int] | None, elsewhere: bool) -> int:
        from recycle_plugin.runtime.processes import standing_by

        return standing_by.stand_by(with_credentials(place, command), line, address, elsewhere)

    outlive_readers()
    return Guard(supervise, host if place.get("RANK") == "0" else None, stand_by).hold()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
