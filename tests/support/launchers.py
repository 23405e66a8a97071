"""Stand-ins for pdsh and for SLURM's srun, which are on few machines: they are neither, and do what the manuals say
where a job depends on it.

Hosts are the network namespaces of tests/support/hosts.py; RECYCLE_TEST_HOSTS has {name: a process there} as JSON.
What runs on one gets no variable of this process but those that tests need, as under sshd.

pdsh(1): runs the command on all hosts of -w at once, puts "host: " before what it prints, and "%n" becomes the host's
number.  Hosts do not watch each other: one that ends stops no other.  With -S it returns the largest of the remote
commands' codes.  A host that is gone is ssh's 255.

srun(1): starts -n tasks, as many on each node, with SLURM_* variables and, by --export=ALL, the own ones.  It returns
the largest code of its tasks, 128 + the signal for a killed one.  When a node fails (here: once RECYCLE_TEST_FAILED, a
folder, has a file of its name), the step is terminated, with SIGTERM at first, unless there is --no-kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import REMAINDER, ArgumentParser
from pathlib import Path

POLL_S = 0.05
KEPT = ("RECYCLE_RUN", "RECYCLE_FORK_SERVER", "RECYCLE_TEST_", "RES_OPTIONS", "TORCH_CPP_LOG_LEVEL")
LOST = 255  # ssh's code, when the connection has gone


def install(folder: Path) -> str:
    """The folder, to stand first in PATH, with both programs, and sinfo by which DeepSpeed tells that there is
    SLURM.
    """
    folder.mkdir()
    root = str(Path(__file__).parents[2])
    for name in ("pdsh", "srun", "sinfo"):
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {root!r})\nfrom tests.support import "
            f"launchers\nsys.exit(launchers.{name}())\n"
        )
        program.chmod(0o755)
    return str(folder)


def hosts() -> dict[str, str]:
    return json.loads(os.environ["RECYCLE_TEST_HOSTS"])


def start(host: str, command: list[str], **options: object) -> subprocess.Popen:
    return subprocess.Popen(["nsenter", "--target", hosts()[host], "--net", "--uts", *command], **options)


def remote(host: str) -> dict[str, str]:
    return {"HOME": os.environ["HOME"], "PATH": "/usr/sbin:/usr/bin:/bin", "RECYCLE_TEST_HOST": hosts()[host]} | {
        name: value for name, value in os.environ.items() if name.startswith(KEPT)
    }


# --- pdsh --------------------------------------------------------------------------------------------


def pdsh() -> int:
    parser = ArgumentParser("pdsh")
    parser.add_argument("-S", action="store_true")
    parser.add_argument("-f", type=int)
    parser.add_argument("-w")
    parser.add_argument("command", nargs=REMAINDER)
    found = parser.parse_args()
    assert os.environ["PDSH_RCMD_TYPE"] == "ssh"
    command = " ".join(found.command)
    if command.startswith("pkill "):  # hosts share their processes here
        command = command.replace("pkill ", "pkill --ns $$ --nslist net ", 1)
    signal.signal(signal.SIGINT, lambda *_: None)  # lists who runs; only a second one ends it
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = {}
    for number, host in enumerate(found.w.split(",")):
        run = ["sh", "-c", command.replace("%n", str(number)).replace("%h", host)]
        running[host] = start(host, run, env=remote(host), cwd=os.environ["HOME"], **streams)
    printing = [threading.Thread(target=_print, args=pair) for pair in running.items()]
    for thread in printing:
        thread.start()
    codes = [process.wait() for process in running.values()]
    for thread in printing:
        thread.join()
    return max(code if code >= 0 else LOST for code in codes) if found.S else 0


def _print(host: str, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f"{host}: {line}", end="", flush=True)
    if process.wait() < 0:
        print(f"pdsh@here: {host}: ssh exited with exit code {LOST}", file=sys.stderr, flush=True)


# --- srun --------------------------------------------------------------------------------------------


def sinfo() -> int:
    return 0


def srun() -> int:
    parser = ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("-n", type=int, default=int(os.environ.get("SLURM_NTASKS", 0)))
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--kill-on-bad-exit", choices=["0"])  # as it is here
    parser.add_argument("--wait", choices=["0"])
    parser.add_argument("--export")
    parser.add_argument("command", nargs=REMAINDER)
    found = parser.parse_args()
    everything, *more = found.export.split(",") if found.export else ["ALL"]
    assert everything == "ALL"
    own = os.environ | dict(pair.split("=", 1) for pair in more)
    names = list(hosts())
    each = found.n // len(names)
    own |= {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": str(found.n),
        "SLURM_STEP_NODELIST": ",".join(names),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{len(names)})",
    }
    tasks = []
    for number in range(found.n):
        node, local = divmod(number, each)
        place = {
            "SLURM_PROCID": str(number),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
            "RECYCLE_TEST_HOST": hosts()[names[node]],
        }
        tasks.append(start(names[node], found.command, env=own | place))
    codes = _follow(tasks, found.no_kill)
    return max(code if code >= 0 else 128 - code for code in codes)


def _follow(tasks: list[subprocess.Popen], no_kill: bool) -> list[int]:
    failed = Path(os.environ["RECYCLE_TEST_FAILED"])
    told = set()
    while any(task.poll() is None for task in tasks):
        for node in {path.name for path in failed.glob("*")} - told:
            told.add(node)
            print(f"srun: error: Node failure on {node}", file=sys.stderr, flush=True)
            for task in tasks if not no_kill else ():
                task.terminate()
        time.sleep(POLL_S)
    return [task.wait() for task in tasks]
