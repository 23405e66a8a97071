"""The stages of ``scripts/on_gpu``, in their order, and the process that runs one of them."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from recycle_plugin import folders
from recycle_plugin.lab.checks.killed import failed
from recycle_plugin.lab.checks.rows import Row
from recycle_plugin.lab.gpu import gpu_figures, gpu_jobs, gpu_links, gpu_recoveries
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.lab.runs import RunFailed, terminable
from recycle_plugin.runtime.devices.host import HOST


class GpuStage(NamedTuple):
    """A stage: ``run`` takes about ``estimate_s`` seconds, and is ended after ``deadline_s`` seconds."""

    name: str
    estimate_s: float
    deadline_s: float
    run: Callable[[StagePlace], list[Row]]


STAGES = {
    stage.name: stage
    for stage in (
        GpuStage("smoke", 50, 500, gpu_jobs.smoke),
        GpuStage("precision", 60, 580, gpu_jobs.precision),
        GpuStage("kills", 85, 580, gpu_jobs.kills),
        GpuStage("sanitizer", 20, 200, gpu_jobs.sanitizer),
        GpuStage("context", 15, 200, gpu_jobs.context),
        GpuStage("links", 45, 200, gpu_links.links),
        GpuStage("nccl", 180, 580, gpu_links.jobs),
        GpuStage("returns", 30, 300, gpu_recoveries.returns),
        GpuStage("replay", 30, 300, gpu_recoveries.replay),
        GpuStage("sharded", 40, 300, gpu_recoveries.sharded),
        GpuStage("split", 60, 400, gpu_figures.split),
        GpuStage("undo", 30, 200, gpu_figures.undo),
        GpuStage("copies", 20, 120, gpu_figures.copies),
        GpuStage("rng", 10, 120, gpu_figures.rng),
    )
}


def run(name: str, out: Path, device: str) -> list[Row]:
    """Run a stage in this process; an exception becomes a failed row."""
    place = StagePlace(device, out, out / name, rehearsal=device == HOST.type)
    place.folder.mkdir(parents=True, exist_ok=True)
    if place.rehearsal:
        torch.set_num_threads(1)
    try:
        return STAGES[name].run(place)
    except RunFailed as error:
        return [failed(name, error, place.folder)]
    except Exception as error:
        traceback.print_exc()
        return [Row(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}", f"see {name}/output.txt")]


def main() -> int:
    """Run the stage that the command line names, and write its rows as JSON to --rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(STAGES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    found = parser.parse_args()
    with terminable():
        rows = run(found.name, found.out, found.device)
    folders.put(found.rows, json.dumps([row.as_data() for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
