"""A warm process that forks workers and stores: what all of them import is imported once.

``python -u -m recycle_plugin.runtime.processes.fork_server ADDRESS MODULE…`` imports the modules and prints one line:
``ready ADDRESS``, and then it serves what :mod:`recycle_plugin.runtime.processes.spawn` asks for; or ``unsafe WHY``,
and then it ends.  ADDRESS is the path of a Unix socket; or ``@``, with the number of a pipe, for a socket without a
file, whose name the answer has: the server ends once the other end of that pipe is closed.

It has one thread, since a fork has only the one that made it: a lock that another held would stay locked.  So nothing
that starts threads runs here, no backward pass on a device in particular.  Of NumPy's OpenBLAS, which makes its threads
when it is loaded, workers have one thread each.

Nothing outlives anybody: the server ends with the process that started it, a worker with the server, and a worker is
killed once whoever asked for it has gone.
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
from recycle_plugin.runtime.processes.spawn import LANGUAGE, STOPPED, Request, die_with_parent, socket_name, user_of
from recycle_plugin.runtime.system.accepting import Refusals

REQUEST_S = 10.0  # how long who has connected may take to say what it wants
BACKLOG = 64


class Server:
    """Serves requests for forks in one loop, with the ends of workers and of those who asked for them.

    ``in_worker`` is called in each fork, in its environment and before anything else; ``line``: the pipe whose end ends
    the server, if there is one.
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
        self._opens_at: float | None = None  # where nobody is let in, since there was no room
        self._workers: dict[int, tuple[socket.socket, int]] = {}  # pid: the connection of who asked for it, a pidfd

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
        except (OSError, ValueError):  # it has gone, or is not one of ours
            connection.close()
            return
        try:
            self._fork(connection, request, streams)
        except OSError as error:
            connection.sendall(f"no process could be forked ({error.strerror})\n".encode())
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

    def _become_worker(
        self, connection: socket.socket, request: Request, out: int, err: int, kept: int | None = None
    ) -> None:
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
        if kept is not None:
            assert request.keep_fd is not None, "a third descriptor gets a number"
            os.dup2(kept, request.keep_fd)
        given = {stream for stream in (out, err, kept) if stream is not None}
        for stream in given - {1, 2, request.keep_fd}:
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
        """Who has asked for a worker never writes again: that its connection is readable means that it has gone.

        The same look may have found the worker's end before: then its number may be another process's.
        """
        if pid in self._workers:
            os.kill(pid, signal.SIGKILL)
            self._selector.unregister(self._workers[pid][0])


def _received(connection: socket.socket) -> tuple[Request, list[int]]:
    """A request, and the descriptors that the fork gets; ValueError for what is none, or another user's."""
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
    if not isinstance(request, Request) or streams != 2 + (request.keep_fd is not None):
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


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except OSError:
        pass  # it has gone, which the loop sees as well


def _run(module: str, first: Callable[[], None]) -> int:
    """Run the module as ``python -m`` would; its exit code."""
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
        sys.stdout.flush()
        sys.stderr.flush()


def _seed() -> None:
    """Seed NumPy's and torch's generators anew: they were seeded when they were imported, which was once for all
    workers.

    Python's own generator sees to itself.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def unsafe() -> str:
    """Why this process should not be forked, in words; empty where it may be."""
    threads = sorted(Path("/proc/self/task").iterdir())
    if len(threads) > 1:
        return (
            f"there are {len(threads)} threads ({', '.join((each / 'comm').read_text().strip() for each in threads)})"
        )
    if "torch" in sys.modules:
        from recycle_plugin.runtime.devices.kinds import in_use

        return "an accelerator is in use" if in_use() else ""
    return ""


def main(address: str, modules: list[str], in_worker: Callable[[], None] = lambda: None) -> None:
    """Import the modules, print ``ready`` or ``unsafe``, and serve until this process is ended.

    ``in_worker``: see :class:`Server`.
    """
    die_with_parent()
    signal_info.block()  # not ignored: a worker that gets one before it is set up would lose it
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
    except BrokenPipeError:  # who started it has ended before it could be ended with it
        os._exit(1)
    answer.close()
    if not why:
        Server(listener, in_worker, line).serve()


def _warm(modules: list[str]) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # workers have their own environment
    for module in modules:
        importlib.import_module(module)
    from recycle_plugin import planner

    planner.warm()
    gc.freeze()  # what is shared stays shared: the collector writes to what it looks at


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
