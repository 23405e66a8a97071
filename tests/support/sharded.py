"""Jobs of tests/jobs/sharded.py, and what they are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ForkServer, Result
from tests.support.launching import cleaned, finished, here

SCRIPT = "tests/jobs/sharded.py"
RANKS, HELD, LONG = 4, 8, 40
JOB = {
    "replicas": 2,
    "stage": 1,
    "steps": 10,
    "accumulation": 2,
    "kind": "fp32",
    "clip": 0.3,
    "kills": [],
    "faults": [],
    "held": [],
    "stops": {},
    "ledger": None,
    "saves": [],
    "exports": [],
    "touches": "",
    "counts": False,
    "refuse": False,
    "load": None,
    "seldom": False,
    "odd": False,
    "averages": False,
    "meets": False,
    "rates": "config",
    "factors": {},
    "shrinks": False,
    "wrong": "",
    "lag": None,
    "seed": None,
    "recycle": {},
    "standin": False,
    "config": {},
}
ROUNDING = {"fp32": 2e-6, "bf16": 4e-3}  # of weights, after all steps: sums are made in another order
Start = Callable[..., Result]


def devices(job: dict[str, Any], late: str = "7") -> dict[str, str]:
    """The environment in which this machine has a stand-in accelerator for each rank, if the job asks for them."""
    wanted = {"RECYCLE_TEST_STANDIN_DEVICES": str(RANKS), "RECYCLE_TEST_STANDIN_LATE": late}
    return wanted if job["standin"] else {}


@contextmanager
def starting(server: ForkServer, folder: Path) -> Iterator[Start]:
    """``start(stage=3, kills=…)`` runs a job, and waits for so many newcomers (``waits``), those of one replica, where
    members are held; at the end nothing of any of them may be left.
    """
    with cleaned() as runs:

        def start(ranks: int = RANKS, waits: int = 0, **more: Any) -> Result:
            place = folder / f"run{len(runs)}"
            job = JOB | more | {"folder": str(place)}
            runs.append(here(server, place, ranks, SCRIPT, [], RECYCLE_TEST_SHARDED=json.dumps(job), **devices(job)))
            newcomers = waits or (ranks // job["replicas"] if job["held"] else 0)
            return finished(runs[-1], job["held"], newcomers)

        yield start


def ledger(result: Result, ranks: int, accumulation: int = 2) -> dict[str, dict[str, list[int]]]:
    """The samples of each step, dealt out to all ranks; each step has as many, none of them twice.

    What the lost have drawn for a step counts where the others have not drawn all of it.
    """
    stayed = {rank for rank, record in result.records.items() if record["incarnation"] == 0}
    dealt, gone = {}, [file for file in result.folder.glob("drawn/*.0") if int(file.stem) not in stayed]
    drawn = [line.split() for file in gone for line in file.read_text().splitlines()]
    for step in sorted({step for each in result.records.values() for step in each["used"]}, key=int):
        samples = [one for each in result.records.values() for one in each["used"].get(step, [])]
        if len(samples) < ranks * accumulation:
            samples += [int(sample) for of_step, sample in drawn if of_step == step]
        assert len(samples) == len(set(samples)) == ranks * accumulation, (step, samples)
        dealt[step] = {str(rank): samples[rank * accumulation : (rank + 1) * accumulation] for rank in range(ranks)}
    return dealt


def weights(record: dict[str, Any]) -> list[float]:
    return [value for name in sorted(record["weights"]) for value in record["weights"][name]]


def ended_well(result: Result, apart: int = 1) -> None:
    """Nothing was said that should not be, and all ranks at the end have the same weights, to the bit; ``apart``: those
    whose numbers are so far apart.
    """
    assert result.code == 0, result.output[-6000:]
    assert not result.of("error") and not result.of("warning"), result.output[-6000:]
    kinds = {rank % apart: weights(record) for rank, record in result.records.items()}
    assert all(weights(record) == kinds[rank % apart] for rank, record in result.records.items())


def trained_as_stock(start: Start, result: Result, stage: int) -> None:
    """A replica of two was lost, and the other has trained what stock DeepSpeed does with the ledger's samples."""
    gone = {event["rank"] for event in result.of("lost")}
    assert gone in ({0, 1}, {2, 3}) and result.records.keys() == {0, 1, 2, 3} - gone
    stock = start(stage=stage, replicas=0, ledger=ledger(result, RANKS))
    assert stock.code == 0, stock.output[-6000:]
    for each in result.records.values():
        assert weights(each) == pytest.approx(weights(stock.records[0]), abs=ROUNDING["fp32"])
