"""A plain pipeline whose script forks helpers after step 4: ``forks.py HOW RUN_DIR``.

Each rank writes what it found to RUN_DIR/losses/rank<r>.json.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import endings
import torch
from plain import batch, loss
from torch import nn

from recycle_plugin.adapters.plain import Pipeline

how, run_dir = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])
STEPS = 12


def idle() -> None:
    deadline = time.monotonic() + 600
    while not (run_dir / "stop").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def square(number: int) -> int:
    return number * number


def terminated() -> object:
    helper = multiprocessing.Process(target=idle)
    helper.start()
    helper.terminate()
    helper.join(60)
    return helper.exitcode


def pool() -> object:
    with multiprocessing.Pool(2) as workers:
        return workers.map(square, range(4))


def loader() -> object:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    return sum(each.sum().item() for (each,) in torch.utils.data.DataLoader(data, num_workers=2))


def forked(then) -> object:
    """The code of a fork that goes on with ``then()`` in the script's place."""
    child = os.fork()
    if child == 0:
        then()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def peers() -> list[int]:
    """The ports that this process is connected to, or listens at."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                found.append(connection.getpeername()[1])
        except OSError as error:
            found += [0] if error.errno == errno.ENOTCONN else []
    return found


def sockets() -> object:
    """Of a fork: what it is connected to besides the store, which is torch's; and of this process."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(peers()).encode())
        os._exit(0)
    os.close(writer)
    theirs, store = json.loads(os.read(reader, 1 << 16)), int(os.environ["MASTER_PORT"])
    os.wait()
    return [[port for port in each if port != store] for each in (theirs, peers())]


def outliving() -> object:
    """A helper that lives on when its worker is killed."""
    helper = multiprocessing.Process(target=idle, daemon=True)
    helper.start()
    (run_dir / f"helper{RANK}").write_text(str(helper.pid))
    return None


settings = {
    "run_dir": str(run_dir),
    "report": False,
    "faults": ["kill 1.1 before 1W1.0@7"] if how == "outliving" else [],
}
pipeline = Pipeline(
    [lambda: nn.Embedding(64, 16), lambda: nn.Linear(16, 64)],
    loss,
    lambda given: torch.optim.Adam(given),
    batch,
    2,
    2,
    settings=settings,
)
HELPERS = {
    "terminated": terminated,
    "one terminated": lambda: RANK == 1 and terminated(),
    "pool": pool,
    "loader": loader,
    "sockets": sockets,
    "outliving": outliving,
    "exits": lambda: forked(lambda: sys.exit(0)),
    "exits with 3": lambda: forked(lambda: sys.exit(3)),
    "fails": lambda: forked(lambda: 1 / 0),
    "trains on": lambda: forked(pipeline.step),
    "is interrupted": lambda: forked(interrupted),
    "meets": lambda: forked(torch.distributed.barrier),
}
losses = []
for step in range(1, STEPS + 1):
    losses.append(pipeline.step())
    if step == 4:
        found = HELPERS[how]()
endings.leave(run_dir, {"losses": losses, "found": found})
