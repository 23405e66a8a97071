"""A terminal that is closed, and launchers that a hangup ends whose output nobody reads: on rank 0's host, and another.

DeepSpeed's command is started on each host as a user does it there.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TextIO

import psutil
import pytest

from recycle_plugin.lab.runs import processes_with
from tests.support.cluster import POLL_S, ROOT
from tests.support.hosts import HostsRun
from tests.support.jobs import PLAIN, WRAPPED, Shape, after_step, assert_same_training, hold
from tests.support.launching import launching

TWO = Shape(replicas=2, stages=1)  # a worker on each host
HOSTS = pytest.mark.parametrize("host", ("alpha", pytest.param("beta", marks=pytest.mark.all_kills)))


class Reader(threading.Thread):
    """Copies what comes out of a pipe or a terminal to a file, until nobody is to read it any more."""

    def __init__(self, end: int, to: int) -> None:
        super().__init__(daemon=True)
        self._end, self._to, self._over = end, to, threading.Event()
        self.start()

    def run(self) -> None:
        with suppress(OSError):  # of a terminal that all others have closed
            while not self._over.is_set():
                if select.select([self._end], [], [], POLL_S)[0] and not os.write(
                    self._to, os.read(self._end, 1 << 16)
                ):
                    break
        os.close(self._end)
        os.close(self._to)

    def stop(self) -> None:
        self._over.set()
        self.join(60)


class Read(HostsRun):
    """A job whose hosts are seen through what ``opens`` returns, a pipe or a terminal: its ends to read and write."""

    def __init__(self, hosts, *arguments, opens: Callable[[], tuple[int, int]], **options: object) -> None:
        self._opens, self.readers, self.commands = opens, dict[str, Reader](), dict[str, psutil.Process]()
        super().__init__(hosts, *arguments, cold=True, **options)

    def _cold(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> subprocess.Popen:
        (hostfile := self.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in self._hosts.names))

        def launch(name: str, node: list[str], output: TextIO) -> subprocess.Popen:
            end, theirs = self._opens()
            # pytest may itself be started so that it ignores hangups
            session = ["env", "--default-signal=HUP", "setsid", *["--ctty"] * os.isatty(theirs)]
            start = *session, *self._hosts.entering(name), "deepspeed", "--hostfile", str(hostfile), "--no_ssh"
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
            process = subprocess.Popen([*start, *node, *program], cwd=ROOT, env=variables, **streams)
            os.close(theirs)
            self.readers[name] = Reader(end, os.dup(output.fileno()))
            self.commands[name] = psutil.Process(process.pid)
            return process

        return self._on_all(launch, output)

    def hang_up(self, name: str) -> None:
        """Nobody reads any more what is said there, and the job goes on while the other host's command does."""
        self.readers[name].stop()
        first, other = self._hosts.names
        if name == first:
            self.launcher, self.others[other] = self.others[other], self.launcher

    def ended(self):
        """Its result, once all of it has ended: the command of a host may have gone before."""
        _, left = psutil.wait_procs(processes_with(self.mark), timeout=120)
        assert not left, (left, self.output[-6000:])
        return replace(self.finish(), code=0)


@pytest.fixture
def vehicle():
    return PLAIN


@pytest.fixture
def launch(plain_server, tmp_path, pair):
    readers: list[Reader] = []
    with launching(plain_server, tmp_path, partial(Read, pair), PLAIN) as start:

        def launch(opens: Callable[[], tuple[int, int]]) -> Read:
            wrap = [hold(tmp_path)]
            more = "recycle.heartbeat_timeout_s=3", "recycle.rejoin=always"
            run = start(*more, script=WRAPPED, shape=TWO, opens=opens, RECYCLE_TEST_WRAP=json.dumps(wrap))
            readers.extend(run.readers.values())
            after_step(run, 4)
            return run

        yield launch
    for reader in readers:
        reader.stop()


@HOSTS
def test_a_hangup_ends_launchers_and_nobody_reads_what_is_said(launch, reference, tmp_path, host):
    """Then a host's guards, and on the first the coordinator, go on without them."""
    run = launch(os.pipe)
    launchers = [run.commands[host], *run.commands[host].children()]
    run.hang_up(host)
    for process in launchers:
        process.send_signal(signal.SIGHUP)
    psutil.wait_procs(launchers, timeout=60)
    (tmp_path / "go").touch()
    result = run.ended()
    assert_same_training(result, reference(shape=TWO))
    assert not result.of("coordinator")


@HOSTS
def test_a_terminal_is_closed(launch, reference, tmp_path, host):
    """The hangup ends the worker there, as stock's; its guard has another one come."""
    run = launch(os.openpty)
    lost = {"alpha": "0.0", "beta": "1.0"}[host]
    run.hang_up(host)
    run.hear("newcomer")
    (tmp_path / "go").touch()
    result = run.ended()
    assert_same_training(result, reference(shape=TWO), {lost})
    assert [each["code"] for each in result.of("confirmed")] == [-signal.SIGHUP] and not result.of("coordinator")
