"""A worker that trains nothing, and needs no torch: ``python -m tests.support.tiny_worker FOLDER REJOIN [what]`` takes
part in a job of one stage.  It leaves as planned as soon as it is to.

What it finds in its environment is in FOLDER/rankR.I.json.  ``what`` newcomers do: "die" at once, with code 1, or wait
until they are ended, as all others do.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

from recycle_plugin.authentication.secret import SecretFile
from recycle_plugin.core.messages.from_coordinator import End, Generation, Welcome
from recycle_plugin.core.messages.from_workers import Hello, Left, Ready, SurvivorReport
from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.runtime.control.connections import ControlWay, connect
from recycle_plugin.runtime.processes import signal_info
from recycle_plugin.runtime.processes.spawn import die_with_parent
from tests.support.membership import job, member

PATIENCE_S = 60.0
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RECYCLE_INCARNATION", "RECYCLE_COORDINATOR")


def main(folder: str, rejoin: str, what: str = "") -> int:
    die_with_parent()
    signal_info.unblock()
    rank, incarnation = int(os.environ["RANK"]), int(os.environ["RECYCLE_INCARNATION"])
    record = Path(folder) / f"rank{rank}.{incarnation}.json"
    record.write_text(json.dumps({name: os.environ.get(name) for name in NAMES} | {"pid": os.getpid()}))
    if incarnation and what == "die":
        return 1
    host, _, port = os.environ["RECYCLE_COORDINATOR"].rpartition(":")
    control = connect(ControlWay((host, int(port)), SecretFile.of_worker(os.environ)), PATIENCE_S)
    control.send(Hello(rank, "worker", os.getpid(), "h", incarnation), PATIENCE_S)
    welcome = control.receive(PATIENCE_S)
    assert isinstance(welcome, Welcome) and welcome.incarnation == incarnation, welcome
    ranks = int(os.environ["WORLD_SIZE"])
    wanted = job(
        replicas=ranks,
        stages=1,
        costs=CostModel.uniform(1),
        heartbeat_timeout_s=inf,
        rejoin=int(rejoin) if rejoin.isdecimal() else rejoin,
    )
    control.send(Ready(replace(member(rank, replicas=ranks), incarnation=incarnation), 0, wanted), PATIENCE_S)
    while (message := control.receive(PATIENCE_S)) is not None or control.broken is None:
        if isinstance(message, Generation) and rank not in message.roster.ranks:
            control.send(Left(rank, planned=True, incarnation=incarnation), PATIENCE_S)
            return 0
        if isinstance(message, Generation):
            control.send(SurvivorReport(rank, message.number, 0, "plan", {}, incarnation=incarnation), PATIENCE_S)
        if isinstance(message, End):
            control.send(Left(rank, incarnation=incarnation), PATIENCE_S)
            return int(message.failed)
    return 4


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
