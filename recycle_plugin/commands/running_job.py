"""Requests of a command to the coordinator of a running job."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from recycle_plugin.authentication.secret import SETTING, NoSecret, SecretFile
from recycle_plugin.core.messages.from_coordinator import Answer, RunFolder
from recycle_plugin.core.messages.from_operators import Ask
from recycle_plugin.core.messages.from_workers import Hello
from recycle_plugin.errors import NoCredentials
from recycle_plugin.observability.event_log import EVENTS
from recycle_plugin.observability.run_history import RunHistory
from recycle_plugin.observability.run_summary import end
from recycle_plugin.runtime.control.connections import ControlWay, SocketControl, connect
from recycle_plugin.runtime.control.operator_access import OperatorAccess
from recycle_plugin.runtime.system.host import host_name

CONNECT_S = 5.0  # to reach the coordinator
LAST_PORT = 65535
ANSWER_S = 30.0  # for its answer


def folder_at(host: str, port: int) -> Path:
    """Return the run folder of the job with this coordinator. Raises ValueError if none can be read here."""
    job = f"{host}:{port}"
    try:
        if not 0 < port <= LAST_PORT:  # the resolver takes larger ones modulo 65536
            raise OSError(f"ports go from 1 to {LAST_PORT}")
        secret = SecretFile.of(os.environ | {"MASTER_PORT": str(port)})
        if not secret.there:
            _check_listens(host, port)
            raise NoSecret(
                f"a process listens, but its job's secret is not at {secret.path}: ask on the master's host, or set "
                f"{SETTING} to the file with the secret"
            )
        control, folder = _connected(ControlWay((host, port), secret))
    except (OSError, NoCredentials) as error:
        raise ValueError(f"{job} is no run folder, and no job answers there: {error}") from None
    control.close()
    if not folder:
        raise ValueError(f"the job at {job} has not started training yet")
    if not (Path(folder) / EVENTS).is_file():
        raise ValueError(f"the run folder of the job at {job}, {folder}, can't be read here: ask on a host that has it")
    return Path(folder)


def _check_listens(host: str, port: int) -> None:
    """Raise OSError, which says what is wrong, if no process listens there."""
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except ConnectionRefusedError:
        raise ConnectionRefusedError("nothing listens") from None
    except socket.gaierror as error:
        raise OSError(f"no address is known for host {host} ({error.strerror})") from None


def ask(folder: Path, make: Callable[[str], Ask], what: str) -> Answer:
    """Send ``make(what)`` to the job of this run folder, and return its answer. Raises ValueError, OSError."""
    access = OperatorAccess.read(folder)
    why = end(RunHistory.read(folder, whole=False))
    if why is not None:
        return Answer(f"the job is over: {why}", False)
    if access is None:
        return Answer(f"the job of {folder} takes no requests: its run folder has no address of it", False)
    try:
        control, _ = _connected(ControlWay(access.address, access.secret))
    except OSError as error:
        return Answer(f"the job of {folder} can't be reached; it may have ended: {error}", False)
    with closing(control):
        control.send(make(what), ANSWER_S)
        said = control.receive(ANSWER_S)
    if not isinstance(said, Answer):
        return Answer(f"the coordinator did not answer within {ANSWER_S:.0f} s, but may have done it", False)
    return said


def _connected(way: ControlWay) -> tuple[SocketControl, str]:
    """Return a connection to a coordinator, and its run folder. Raises ConnectionError, NoCredentials."""
    control = connect(way, CONNECT_S)
    with ExitStack() as unless_known:
        unless_known.callback(control.close)
        control.send(Hello(-1, "operator", os.getpid(), host_name()), ANSWER_S)
        said = control.receive(ANSWER_S)
        if not isinstance(said, RunFolder):
            why = control.broken or f"no answer within {ANSWER_S:.0f} s"
            raise ConnectionError("the coordinator at {}:{} does not answer: {}".format(*way.address, why))
        unless_known.pop_all()
        return control, said.path
