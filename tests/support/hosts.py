"""Several hosts on one machine: network namespaces, each with a host name and a line of its own to a switch.

Unnamed ones, which a process each holds open: nothing of them is left once the test run is gone, however it ended.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, TypeVar

import psutil

import recycle_plugin.launch
from recycle_plugin.authentication.secret import SETTING
from recycle_plugin.lab.runs import environment
from tests.support.cluster import DEEPSPEED, POLL_S, ForkServer, Result, Run, WarmLauncher, started
from tests.support.launchers import install

Launcher = TypeVar("Launcher", WarmLauncher, subprocess.Popen)

NAMES = ("alpha", "beta")
MORE = (*NAMES, "gamma", "delta", "epsilon")
NOBODYS = "02:00:00:00:00:fe"  # no host has this hardware address
ESTABLISHED = "01"  # in /proc/net/tcp
RELAY, BESIDE = "relay", "beside"  # a lossy line's second end, and what joins that to the switch
HOLDS = "hostname {} && ip link set lo up && echo ready && exec cat"  # until its input ends


class NoHosts(RuntimeError):
    """This machine lets nobody make network namespaces; the message says why."""


class Hosts:
    """Hosts with these ``names``, and the switch between them.

    Lines can be cut: then nothing gets through, and no connection is closed.
    """

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.names = names
        self._holders: dict[str, subprocess.Popen] = {}

    def open(self) -> None:
        """Raises NoHosts."""
        if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
            raise NoHosts(f"{missing[0]} is not installed")
        for name in (*self.names, "switch"):
            self._holders[name] = _hold(name)
        self._on("switch", "add", "bridge", "type", "bridge")
        self._on("switch", "set", "bridge", "up")
        for name in self.names:
            ends = f"eth0 netns {self.pid(name)} type veth peer name {name} netns {self.pid('switch')}"
            _command("ip", "link", "add", *ends.split())
            self._enter(name, "ip", "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._on(name, "set", "eth0", "up")
            self._on("switch", "set", name, "master", "bridge")
            self._on("switch", "set", name, "up")

    def close(self) -> None:
        for holder in self._holders.values():
            holder.stdin.close()
            holder.wait(10)

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def pid(self, name: str) -> int:
        return self._holders[name].pid

    def connections(self, name: str) -> list[tuple[int, int]]:
        """The ports, here and there, of each end of a TCP connection on that host; psutil sees those of this one."""
        rows = [line.split() for line in Path(f"/proc/{self.pid(name)}/net/tcp").read_text().splitlines()[1:]]
        ports = [[int(address.partition(":")[2], 16) for address in row[1:3]] for row in rows if row[3] == ESTABLISHED]
        return [(here, there) for here, there in ports]

    def cut(self, name: str) -> None:
        """Pull the host's plug out of the switch."""
        self._on("switch", "set", name, "down")

    def reset(self, name: str, port: int) -> None:
        """Reset each of its TCP connections to this port elsewhere. Raises NoHosts if this kernel lets nobody do so."""
        before = {one for one in self.connections(name) if one[1] == port}
        self._enter(name, "ss", "--kill", "--tcp", "dport", "=", f":{port}")
        if before & set(self.connections(name)):
            raise NoHosts("the kernel resets no connections")

    def unplug(self, name: str) -> None:
        """Take the network device out of the host, for good."""
        self._on(name, "del", "eth0")

    def mute(self, name: str) -> None:
        """Nothing that the host sends gets anywhere; it hears all."""
        for other in self.names:
            if other != name:
                self._astray(name, other)

    def deafen(self, name: str) -> None:
        """Nothing that others send gets to the host; they hear all of it."""
        for other in self.names:
            if other != name:
                self._astray(other, name)

    def _astray(self, sender: str, to: str) -> None:
        self._enter(sender, *f"ip neigh replace {self.address(to)} lladdr {NOBODYS} nud permanent dev eth0".split())

    def crash(self, name: str) -> None:
        """SIGKILL to everything that runs on that host, until nothing does."""
        while running := self._running(name):
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def _running(self, name: str) -> list[int]:
        host, found = os.readlink(f"/proc/{self.pid(name)}/ns/net"), []
        for pid in psutil.pids():
            with suppress(OSError):  # it has ended, or is about to
                if os.readlink(f"/proc/{pid}/ns/net") == host and pid != self.pid(name):
                    found.append(pid)
        return found

    def mend(self, name: str) -> None:
        """Make its line good again, and both ways over it."""
        self._on("switch", "set", name, "up")
        for each in self.names:
            if each in self._holders:
                self._enter(each, "ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")

    @contextmanager
    def lossy(self, name: str, loss: float, delay_s: float, seed: int) -> Iterator[None]:
        """Have the host's line lose this share of all frames, each way, and delay the others, inside this context."""
        self._on("switch", "add", RELAY, "type", "veth", "peer", "name", BESIDE)
        for device in (RELAY, BESIDE):
            self._on("switch", "set", device, "promisc", "on", "up")
        self._on("switch", "set", name, "promisc", "on", "nomaster")
        self._on("switch", "set", BESIDE, "master", "bridge")
        of_relay = ["-m", "tests.support.lossy", name, RELAY, str(loss), str(delay_s), str(seed)]
        command = [*self.entering("switch"), sys.executable, *of_relay]
        with subprocess.Popen(
            command, cwd=Path(__file__).resolve().parents[2], stdout=subprocess.PIPE, text=True
        ) as relay:
            try:
                assert relay.stdout.readline() == "ready\n"
                yield
            finally:
                relay.kill()
                self._on("switch", "del", RELAY)
                self._on("switch", "set", name, "master", "bridge")

    def _on(self, name: str, *link: str) -> None:
        self._enter(name, "ip", "link", *link)

    def entering(self, name: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid(name)), "--net", "--uts"]

    def _enter(self, name: str, *command: str) -> None:
        _command(*self.entering(name), *command)


@contextmanager
def hosts(names: tuple[str, ...] = NAMES) -> Iterator[Hosts]:
    """Raises NoHosts."""
    made = Hosts(names)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _hold(name: str) -> subprocess.Popen:
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", HOLDS.format(name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if holder.stdout.readline().strip() != "ready":
        raise NoHosts(holder.communicate()[1].strip())
    return holder


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)}: {done.stderr.strip()}")


class ProgramRun(Run):
    """One job over all hosts, started elsewhere by ``command``: DeepSpeed's with its options, or another program's, of
    which pdsh and srun are stand-ins (tests/support/launchers.py).  Workers come warm from the fork server, all else
    starts cold.

    ``as_file``: the plugin's module is named by its file, which is the script, with the script as its first argument.
    """

    def __init__(
        self,
        hosts: Hosts,
        server: ForkServer,
        folder: Path,
        ranks: int,
        script: str,
        arguments: list[str],
        command: list[str],
        as_file: bool = False,
        **more: str,
    ) -> None:
        self._hosts = hosts
        self._command = command
        self._failed = folder / "failed"
        self._failed.mkdir(parents=True)
        places = {name: str(hosts.pid(name)) for name in self._hosts.names}
        variables = {
            "RECYCLE_FORK_SERVER": server.path,
            "RECYCLE_TEST_HOSTS": json.dumps(places),
            "RECYCLE_TEST_FAILED": str(self._failed),
            SETTING: str(folder / "secret"),
        }
        programs = install(folder / "bin") + os.pathsep + environment()["PATH"]
        self._address = hosts.address(hosts.names[0])
        if as_file:
            script, arguments, more = recycle_plugin.launch.__file__, [script, *arguments], more | {"plugin": None}
        super().__init__(
            server,
            folder,
            ranks,
            script,
            arguments,
            cold=True,
            PATH=programs,
            MASTER_ADDR=self._address,
            **variables,
            **more,
        )

    def _cold(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> subprocess.Popen:
        """What pdsh's hosts have to know of the environment is in .deepspeed_env's place."""
        hostfile, forwarded = self.folder / "hostfile", self.folder / "deepspeed_env"
        hostfile.write_text("".join(f"{name} slots={ranks // len(self._hosts.names)}\n" for name in self._hosts.names))
        forwarded.write_text(
            "".join(f"{name}={variables[name]}\n" for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", SETTING))
        )
        variables |= {"DS_ENV_FILE": str(forwarded), "MASTER_PORT": str(self.port)}
        more = f"--hostfile {hostfile} --no_ssh_check --master_addr {self._address} --master_port {self.port}"
        command = [*self._command, *(more.split() if self._command[0] == "deepspeed" else []), *program]
        return started(command, variables, output)

    def crash(self, name: str) -> None:
        """The host dies, and SLURM comes to know of it."""
        self._hosts.crash(name)
        (self._failed / name).touch()


class HostsRun(Run):
    """One job over all hosts, its launcher started on each as pdsh would start it there; ``cold``: by ``deepspeed
    --no_ssh``.

    What is said on the first, which has rank 0, is the run's output.
    """

    def __init__(
        self,
        hosts: Hosts,
        server: ForkServer,
        folder: Path,
        ranks: int,
        script: str,
        arguments: list[str],
        **options: object,
    ) -> None:
        self._hosts = hosts
        self.others: dict[str, WarmLauncher | subprocess.Popen] = {}
        self.folder = folder
        super().__init__(server, folder, ranks, script, arguments, **{SETTING: str(folder / "secret")} | options)

    def _warm(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> WarmLauncher:
        each = {name: list(range(ranks // len(self._hosts.names))) for name in self._hosts.names}
        world = base64.urlsafe_b64encode(json.dumps(each).encode()).decode()

        def launch(name: str, node: list[str], output: TextIO) -> WarmLauncher:
            here = variables | {"RECYCLE_TEST_HOST": str(self._hosts.pid(name))}
            return WarmLauncher(self._server, DEEPSPEED, [f"--world_info={world}", *node, *program], here, output)

        return self._on_all(launch, output)

    def _cold(self, ranks: int, program: list[str], variables: dict[str, str], output: TextIO) -> subprocess.Popen:
        hostfile = self.folder / "hostfile"
        hostfile.write_text("".join(f"{name} slots={ranks // len(self._hosts.names)}\n" for name in self._hosts.names))

        def launch(name: str, node: list[str], output: TextIO) -> subprocess.Popen:
            start = "deepspeed", "--hostfile", str(hostfile), "--no_ssh"
            command = [*self._hosts.entering(name), *start, *node, *program]
            return started(command, variables, output)

        return self._on_all(launch, output)

    def _on_all(self, launch: Callable[[str, list[str], TextIO], Launcher], output: TextIO) -> Launcher:
        first, *others = self._hosts.names
        master = [f"--master_addr={self._hosts.address(first)}", f"--master_port={self.port}"]
        for number, name in enumerate(others, 1):
            with self._file(name).open("w") as said:
                self.others[name] = launch(name, [f"--node_rank={number}", *master], said)
        self._output = self._file(first)
        self._output.symlink_to(output.name)
        return launch(first, ["--node_rank=0", *master], output)

    def crash(self, name: str) -> None:
        """The host dies; if it is the first, the next one's output is the run's."""
        self._hosts.crash(name)
        if self._file(name) == self._output:
            self.forsake(name)

    def forsake(self, name: str) -> None:
        """Go on without the host whose output the run's was: the next one's is from now on."""
        following = next(iter(self.others))
        self.launcher.wait(10)
        self.launcher, self._output = self.others.pop(following), self._file(following)

    def finish(self, timeout_s: float = 200.0) -> Result:
        result = super().finish(timeout_s)
        for launcher in self.others.values():
            launcher.wait(90)
        return result

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def said_on(self, name: str) -> str:
        return self._file(name).read_text()

    def clean(self) -> list[str]:
        found = super().clean()
        for launcher in self.others.values():
            if launcher.poll() is None:
                found.append(f"launcher {launcher.pid}")
                self._kill(launcher.pid)
            launcher.wait(10)
        return found
