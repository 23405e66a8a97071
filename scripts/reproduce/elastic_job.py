"""A training job under stock DeepSpeed whose processes outlive a loss, as Elastic Horovod's do: commit, restore, sync.

python scripts/reproduce/elastic_job.py [key=value ...], with its task as JSON in ELASTIC_JOB

This process starts the workers, and a new one in place of each killed one. Every ``every`` steps each worker copies its
stage's state in its own memory (a commit). After a loss all regroup, which begins a *round*: the survivors take the
last commit that all of them have, the new process gets its data-parallel peer's, and the steps since then are trained
again. The rank ``lost`` kills itself in round n before the n-th step of ``kills``. No state is on a disk: with one
replica a stage's commits die with its worker, so the job is refused.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stock_job import RANK, StockJob, told

from recycle_plugin.lab.training.compose import TrainingJob, compose_from_command_line

VARIABLE, STORE, ROUND = "ELASTIC_JOB", "ELASTIC_STORE", "ELASTIC_ROUND"
HOST = "127.0.0.1"
KEPT = 2  # commits: a worker may lack the last one
MEETING_S = 120.0  # deadline for all to meet in a round, and for the news of a loss
POLL_S = 0.01


def main() -> None:
    workers = int(os.environ.get("WORLD_SIZE", 0))
    job = compose_from_command_line(sys.argv[1:], __doc__, workers or None)
    if job.topology.replicas < 2:
        raise SystemExit(
            "elastic_job: with topology.replicas=1 nobody else has a stage's state, and its commits, in memory, die "
            "with its worker: take 2 replicas or more, or checkpoints or a log on a disk"
        )
    todo = json.loads(os.environ[VARIABLE])
    if workers:
        Worker(job, todo, workers).run()
    else:
        start(job.workers, Path(todo["folder"]))


# --- the starting process ----------------------------------------------------------------------------------


def start(workers: int, folder: Path) -> None:
    """Start the workers, and a new one for each killed one, until all have ended well. Raises SystemExit if
    one ends otherwise.
    """
    from torch.distributed import TCPStore

    store, number = TCPStore(HOST, 0, is_master=True, wait_for_workers=False), 0
    running = {rank: started(rank, workers, number, store.port) for rank in range(workers)}
    try:
        while running:
            for rank, process in list(running.items()):
                match process.poll():
                    case None:
                        continue
                    case 0:
                        del running[rank]
                    case code if code == -signal.SIGKILL:
                        number += 1
                        told(folder, "seen", rank=rank)
                        store.set(named(number), "")
                        running[rank] = started(rank, workers, number, store.port)
                    case code:
                        raise SystemExit(f"elastic_job: rank {rank} has ended with {code}")
            time.sleep(POLL_S)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def started(rank: int, workers: int, number: int, port: int) -> subprocess.Popen:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, STORE: port, ROUND: number}
    variables = os.environ | {name: str(value) for name, value in place.items()}
    return subprocess.Popen([sys.executable, *sys.argv], env=variables)


def named(number: int) -> str:
    return f"round{number}"


# --- workers -----------------------------------------------------------------------------------------------


class Worker:
    """A worker and its commits, by their steps, over the rounds of its life."""

    def __init__(self, job: TrainingJob, todo: dict[str, Any], workers: int) -> None:
        from torch.distributed import TCPStore

        self._todo, self._workers, self._folder = todo, workers, Path(todo["folder"])
        self._port, self._round = int(os.environ[STORE]), int(os.environ[ROUND])
        self._store = TCPStore(HOST, self._port, is_master=False, timeout=timedelta(seconds=MEETING_S))
        self._stock = StockJob(job)
        self._commits: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        """Train to the end, in as many rounds as needed. Raises RuntimeError if a round fails and no worker was
        lost.
        """
        while True:
            try:
                self._meet()
                self._train(self._synced())
                return
            except RuntimeError as error:
                told(self._folder, "broken")
                self._shut()
                self._await_next(error)
                self._part()

    def _meet(self) -> None:
        """Make the engine with all ranks of this round."""
        from torch.distributed import PrefixStore, init_process_group

        store = PrefixStore(named(self._round), self._store)
        init_process_group(
            "gloo", store=store, rank=RANK, world_size=self._workers, timeout=timedelta(seconds=MEETING_S)
        )
        self._stock.start()
        told(self._folder, "ready")

    def _synced(self) -> int:
        """Take the newest state that all workers with commits have committed; return its step."""
        from torch.distributed import all_gather_object, broadcast_object_list

        newest: list[Any] = [None] * self._workers
        all_gather_object(newest, max(self._commits, default=None))
        if newest != [None] * self._workers:
            step, grid = min(each for each in newest if each is not None), self._stock.engine.grid
            peers = [rank for rank in grid.dp_group if newest[rank] is not None]
            if not peers:
                raise SystemExit(f"elastic_job: no worker of the stage of ranks {grid.dp_group} is left")
            if len(peers) < len(grid.dp_group):
                sent = [self._commits.get(step)]
                broadcast_object_list(sent, src=peers[0], group=grid.get_data_parallel_group())
                self._commits = {step: sent[0]}
            self._commits = {step: self._commits[step]}
            self._stock.take(copy.deepcopy(self._commits[step]))  # an optimizer changes the tensors that it is given
        else:
            step = 0
            self._commit(step)
        told(self._folder, "loaded", step)
        return step

    def _train(self, first: int) -> None:
        kills = self._todo["kills"][self._round :]
        for step in range(first + 1, self._stock.job.steps + 1):
            if kills and step == kills[0] and self._todo["lost"] == RANK:
                told(self._folder, "killed", step)
                os.kill(os.getpid(), signal.SIGKILL)
            told(self._folder, "step", step, loss=self._stock.train(step))
            if step % self._todo["every"] == 0:
                self._commit(step)

    def _commit(self, step: int) -> None:
        self._commits[step] = copy.deepcopy(self._stock.state())
        for old in sorted(self._commits)[:-KEPT]:
            del self._commits[old]
        told(self._folder, "saved", step)

    # --- from one round to the next -----------------------------------------------------------------------

    def _shut(self) -> None:
        """Close the connections to other workers; otherwise those that wait for this one would not wake."""
        for one in psutil.Process().net_connections("tcp"):
            if one.raddr and one.raddr.port != self._port:
                try:
                    with socket.socket(fileno=os.dup(one.fd)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # closed meanwhile, by Gloo or by its other end

    def _await_next(self, error: RuntimeError) -> None:
        """Return once the news of a loss has come."""
        deadline = time.monotonic() + MEETING_S
        while not self._store.check([named(self._round + 1)]):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"round {self._round} has failed, and for {MEETING_S:g} s nobody was lost"
                ) from error
            time.sleep(POLL_S)
        self._round += 1

    def _part(self) -> None:
        """Let go of this round's groups."""
        import deepspeed.comm.comm as deepspeed_comm
        from torch.distributed import destroy_process_group, is_initialized

        del self._stock.engine
        gc.collect()
        if is_initialized():
            destroy_process_group()
        deepspeed_comm.cdb = None  # otherwise DeepSpeed takes it for the next round's


if __name__ == "__main__":
    main()
