"""Stages of ``scripts/on_gpu`` over NCCL, in several processes on one GPU: links with a killed member, and jobs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from recycle_plugin.lab.checks.killed import on_device
from recycle_plugin.lab.checks.rows import Row, judged
from recycle_plugin.lab.gpu.gpu_jobs import MEND, kills, precision
from recycle_plugin.lab.gpu.gpu_recoveries import returns
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.lab.runs import JobRun, RunFailed
from recycle_plugin.runtime.collectives.nccl_door import LIMIT, loaded_release, unfit
from recycle_plugin.runtime.devices.host import HOST
from recycle_plugin.runtime.devices.kinds import NVIDIA

MEMBERS, LINKS_S, CALL_S = 3, 150.0, "2"  # the last: of a blocking call
SHARES_A_GPU = (2, 30, 0)  # the first release of NCCL that allows several members on one GPU
ON_ONE_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}
WORKER = (str(Path(__file__).with_name("link_worker.py")),)


def links(place: StagePlace) -> list[Row]:
    """Sum among three processes, kill one, and try the others' links; or return one line why that can't be tried."""
    reason = untried(place)
    if reason:
        return [Row("links over NCCL", None, reason)]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return tried(place, WORKER, {"CUDA_VISIBLE_DEVICES": first, LIMIT: CALL_S, **ON_ONE_GPU})


def jobs(place: StagePlace) -> list[Row]:
    """Run the kill list, a return and half precision with gradients summed over NCCL."""
    reason = untried(place)
    if reason:
        return [Row("jobs over NCCL", None, reason)]
    os.environ.update(ON_ONE_GPU, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT")  # for all jobs of this process
    plain = ("--settings", json.dumps({"device_link": "nccl"}))
    rows = [
        *kills(replace(place, folder=place.folder / "kills"), *plain),
        *returns(replace(place, folder=place.folder / "returns"), *plain),
        *precision(replace(place, folder=place.folder / "precision"), "recycle.device_link=nccl"),
    ]
    outputs = sorted(place.folder.glob("*/*/output.txt"))
    return [*rows, *(of_groups(path) for path in outputs if path.parent.name != HOST.type)]


def of_groups(output: Path) -> Row:
    """Return whether a job used NCCL, by NCCL's own lines on its groups."""
    groups = output.read_text(errors="replace").count("Init COMPLETE")
    name = f"NCCL in {'/'.join(output.parent.parts[-2:])}"
    return judged(name, "" if groups else "none", f"{groups} ends of groups were made", MEND)


def untried(place: StagePlace) -> str:
    """Return why several processes can't share a GPU over NCCL here, in one line, or ""."""
    if place.device != NVIDIA:
        return f"not tried: there is no NCCL on {place.device}"
    release, wrong = loaded_release(), [*unfit()]
    if wrong:
        return f"not tried: {wrong[0]}"
    if release is None or release < SHARES_A_GPU:
        said = ".".join(map(str, release or ()))
        return f"not tried: NCCL {said} allows one process on a GPU; --nccl FILE loads one from 2.30 on before torch"
    return ""


def tried(place: StagePlace, worker: Sequence[str], variables: dict[str, str]) -> list[Row]:
    """Return a row for each trial of each member."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LINKS_S), wait_for_workers=False)
    rows = []
    with ExitStack() as stack:
        runs = []
        for rank in range(MEMBERS):
            command = [sys.executable, *worker, place.device, str(rank), str(MEMBERS), str(store.port)]
            environment = on_device(place.device) | variables
            runs.append(stack.enter_context(JobRun(place.folder / f"member{rank}", command, environment)))
        for rank, run in enumerate(runs):
            try:
                run.wait_for(lambda run=run: run.launcher.poll() is not None, "its end", LINKS_S)
            except RunFailed:
                pass  # raised also when the process has ended
            rows += of_member(rank, run, killed=rank == MEMBERS - 1)
    return rows


def of_member(rank: int, run: JobRun, killed: bool) -> list[Row]:
    """Return the rows of one member, from its output."""
    found = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    rows = [
        judged(f"{each['name']}, member {rank}", each["wrong"], f"{each['ms']} ms", MEND, ms=each["ms"])
        for each in found
    ]
    code = run.launcher.poll()
    if code != (-9 if killed else 0):
        rows.append(Row(f"member {rank}", False, f"it has ended with {code}", f"see {run.folder.name}/output.txt"))
    return rows
