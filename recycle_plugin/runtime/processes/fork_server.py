"""A warm process that forks workers, so that what all of them import is imported once.

``python -u -m recycle_plugin.runtime.processes.fork_server ADDRESS MODULE…`` imports the modules and prints one line.
After ``ready ADDRESS`` it serves the requests of :mod:`recycle_plugin.runtime.processes.spawn`; after ``unsafe WHY`` it
ends. ADDRESS is the path of a Unix socket; or ``@`` and the number of a pipe, for a socket without a file, whose name
the printed line has: the server then ends when the pipe's other end closes.

The server has one thread, since a fork has only the thread that made it: a lock that another thread held would stay
locked. So nothing that starts threads may run here, in particular no backward pass on a device. NumPy's OpenBLAS, which
starts its threads when it is loaded, gets one thread in each worker.

No process outlives its owner: the server ends with the process that started it, a worker ends with the server, and a
worker is killed when the process that asked for it is gone.
"""

from __future__ import annotations

import array
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from recycle_plugin.core.messages.encoding import HEAD
from recycle_plugin.core.messages.typed import Unreadable
from recycle_plugin.runtime.processes import signal_info
from recycle_plugin.runtime.processes.process_end import flush
from recycle_plugin.runtime.processes.spawn import LANGUAGE, STOPPED, Request, die_with_parent, socket_name, user_of
from recycle_plugin.runtime.system.accepting import Refusals

REQUEST_S = 10.0  # how long a new connection may take to send its request
BACKLOG = 64


class Server:
    """Serves requests for forks in one loop, and watches workers and the processes that asked for them. ``in_worker``
    is called first in each fork, in its environment. ``line``: the pipe whose end ends the server, if any.
    """

    def __init__(self, listener: socket.socket, in_worker: Callable[[], None], line: int | None = None) -> None:
        self._listener = listener
        self._in_worker = in_worker
        self._line = line
        self._selector = selectors.DefaultSelector()
        if line is not None:
            self._selector.register(line, selectors.EVENT_READ, lambda: os._exit(STOPPED))
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._refusals = Refusals(
            lambda text: print(
                f"recycle: warning: at the process that workers are forked from {text}", file=sys.stderr, flush=True
            )
        )
        self._opens_at: float | None = None  # when to accept again, after a refusal for lack of room
        self._workers: dict[int, tuple[socket.socket, int]] = {}  # by pid: the connection that asked for it, a pidfd

    def serve(self) -> None:
        """Serve until this process is ended."""
        while True:
            for key, _ in self._selector.select(
                None if self._opens_at is None else max(0.0, self._opens_at - time.monotonic())
            ):
                key.data()
            if self._opens_at is not None and time.monotonic() >= self._opens_at:
                self._opens_at = None
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            self._opens_at = time.monotonic() + self._refusals.pause_s(error)
            self._selector.unregister(self._listener)
            return
        try:
            request, streams = _received(connection)
        except (OSError, ValueError):  # the caller is gone, or is no process of ours
            connection.close()
            return
        try:
            self._fork(connection, request, streams)
        except OSError as error:
            _tell(connection, f"no process could be forked ({error.strerror})")
            connection.close()
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(self, connection: socket.socket, request: Request, streams: list[int]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(server)
                self._become_worker(connection, request, *streams)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        try:
            ended = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._workers[pid] = (connection, ended)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._reap(pid))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandoned(pid))
        _tell(connection, pid)

    def _become_worker(self, connection: socket.socket, request: Request, out: int, err: int) -> None:
        self._listener.close()
        self._selector.close()
        connection.close()
        if self._line is not None:
            os.close(self._line)
        for other, ended in self._workers.values():
            other.close()
            os.close(ended)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for stream in {out, err} - {1, 2}:
            os.close(stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal_info.unblock()
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        sys.argv = [request.module, *request.arguments]
        os._exit(_run(request.module, self._in_worker))

    def _reap(self, pid: int) -> None:
        connection, ended = self._workers.pop(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(ended)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        os.close(ended)
        _tell(connection, os.waitstatus_to_exitcode(status))
        connection.close()

    def _abandoned(self, pid: int) -> None:
        """Kill a worker: the process that asked for it never writes again, so a readable connection means that it is
        gone. The same poll may have reported the worker's end, and its number may now be another process's.
        """
        if pid in self._workers:
            os.kill(pid, signal.SIGKILL)
            self._selector.unregister(self._workers[pid][0])


def _received(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return a request and the descriptors for the fork; ValueError if it is malformed or another user's."""
    if (user := user_of(connection)) != os.getuid():
        raise ValueError(f"user {user}")
    connection.settimeout(REQUEST_S)
    head, ancillary, flags, _ = connection.recvmsg(HEAD.size, socket.CMSG_SPACE(12))
    streams = array.array("i")
    for _, _, descriptors in ancillary:
        streams.frombytes(descriptors)
    try:
        if flags & socket.MSG_CTRUNC:
            connection.sendall(b"there is no room for its descriptors\n")
            raise ValueError("descriptors are missing")
        return _request(connection, head, len(streams)), list(streams)
    except BaseException:
        for stream in streams:
            os.close(stream)
        raise


def _request(connection: socket.socket, head: bytes, streams: int) -> Request:
    size = LANGUAGE.size(head + _read(connection, HEAD.size - len(head)))
    request = size if isinstance(size, Unreadable) else LANGUAGE.message(_read(connection, size))
    if not isinstance(request, Request) or streams != 2:
        raise ValueError(f"{request}, with {streams} descriptors")
    return request


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ValueError("half a request")
        data += more
    return data


def _tell(connection: socket.socket, what: int | str) -> None:
    try:
        connection.sendall(f"{what}\n".encode())
    except OSError:
        pass  # the caller is gone, which the loop sees as well


def _run(module: str, first: Callable[[], None]) -> int:
    """Run the module as ``python -m`` would. Return its exit code."""
    try:
        first()
        _seed()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        flush()


def _seed() -> None:
    """Seed NumPy's and torch's generators, which imports have seeded once for all workers. Python reseeds its own."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def unsafe() -> str:
    """Return why this process should not be forked, or ""."""
    threads = sorted(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        return (
            f"there are {len(threads)} threads "
            f"({', '.join((each / 'comm').read_text(errors='replace').strip() for each in threads)})"
        )
    if "torch" in sys.modules:
        from recycle_plugin.runtime.devices.kinds import in_use

        return "an accelerator is in use" if in_use() else ""
    return ""


def main(address: str, modules: list[str], in_worker: Callable[[], None] = lambda: None) -> None:
    """Import the modules, print ``ready`` or ``unsafe``, and serve until killed. ``in_worker``: see Server."""
    die_with_parent()
    signal_info.block()  # blocked, not ignored: a worker that is not set up yet would lose them
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an import may print something
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("" if address.startswith("@") else address)
    line = int(address[1:]) if address.startswith("@") else None
    _warm(modules)
    why = unsafe()
    listener.listen(BACKLOG)
    try:
        print(f"unsafe {why}" if why else f"ready {socket_name(listener)}", file=answer, flush=True)
    except BrokenPipeError:  # the parent had ended before die_with_parent()
        os._exit(1)
    answer.close()
    if not why:
        Server(listener, in_worker, line).serve()


def _warm(modules: list[str]) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the server's only: workers have their own environment
    for module in modules:
        importlib.import_module(module)
    from recycle_plugin import planner

    planner.warm()
    gc.freeze()  # keeps memory shared: the collector writes to objects that it looks at


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
