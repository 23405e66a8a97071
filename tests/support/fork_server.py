"""A warm process that forks workers and stores: torch, DeepSpeed and megatron-core are imported once for all jobs.

Speaks the protocol of recycle_plugin.runtime.spawn.  A worker whose supervisor goes away is killed.
Launchers come from here as well (cluster.WarmLauncher).
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
import warnings


def warm() -> None:
    """Everything that a worker imports, so that a fork has it."""
    warnings.filterwarnings("ignore")
    from recycle_plugin.patches import megatron_cpu

    megatron_cpu.apply()
    import deepspeed  # noqa: F401
    import hydra  # noqa: F401
    import torch

    import recycle_plugin.adapters.deepspeed.engine  # noqa: F401
    import recycle_plugin.adapters.megatron.gpt  # noqa: F401

    from recycle_plugin import planner

    torch.set_num_threads(1)
    planner.warm()


class Server:
    """Waits for requests, for the ends of workers and for supervisors that go away, in one loop."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._workers: dict[int, tuple[socket.socket, int]] = {}  # pid: the supervisor's connection, a pidfd

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        header, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(12))
        streams = array.array("i")
        streams.frombytes(ancillary[0][2])
        request = _read(connection, int.from_bytes(header, "big"))
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, json.loads(request), *streams)
        for stream in streams:
            os.close(stream)
        connection.sendall(f"{pid}\n".encode())
        ended = os.pidfd_open(pid)
        self._workers[pid] = (connection, ended)
        self._selector.register(ended, selectors.EVENT_READ, lambda: self._reap(pid))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._abandoned(pid))

    def _become_worker(self, connection: socket.socket, request: dict, out: int, err: int, kept: int | None = None) -> None:
        self._listener.close()
        connection.close()
        for other, ended in self._workers.values():
            other.close()
            os.close(ended)
        os.dup2(out, 1)
        os.dup2(err, 2)
        if kept is not None:
            os.dup2(kept, request["keep_fd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if "RECYCLE_TEST_HOST" in os.environ:
            _enter(os.environ["RECYCLE_TEST_HOST"])
        os.chdir(request["folder"])
        sys.argv = [request["module"], *request["arguments"]]
        os._exit(_run(request["module"]))

    def _reap(self, pid: int) -> None:
        connection, ended = self._workers.pop(pid)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(ended)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        os.close(ended)
        try:
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        except OSError:
            pass  # its supervisor is gone as well
        connection.close()

    def _abandoned(self, pid: int) -> None:
        """A supervisor never writes: that its connection is readable means that it has gone."""
        os.kill(pid, signal.SIGKILL)
        self._selector.unregister(self._workers[pid][0])


def _enter(pid: str) -> None:
    """Go on the host of that process (tests/support/hosts.py)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in ("net", "uts"):
        with open(f"/proc/{pid}/ns/{space}") as opened:
            if libc.setns(opened.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {space}")


def _run(module: str) -> int:
    """Run it as ``python -m`` would; its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += connection.recv(length - len(data))
    return data


def main(path: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test run that is killed leaves no server behind
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    warm()
    listener.listen(64)
    print("ready", flush=True)
    Server(listener).serve()


if __name__ == "__main__":
    main(sys.argv[1])
