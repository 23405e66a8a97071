"""Somebody who reaches a store of torch's that a script brings, which asks nobody: it has nothing of the plugin's own,
so what is changed there runs no code in a worker that comes back, and is no result of a sum.
"""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.coordinator import generation
from tests.support.results import DIED, result_of
from tests.support.scenario import Job, Script
from tests.support.strangers import Runs

TORCHS = ("store_based_barrier_key:", "/store_based_barrier_key:")  # torch's own, when groups are made
FORMER = "0//cpu//"  # where an earlier version had its own keys
LOADED = "a checkpoint, number 1"


def saved(value: Any) -> bytes:
    text = io.BytesIO()
    torch.save(value, text)
    return text.getvalue()


def own_keys(store: dist.TCPStore) -> list[str]:
    """The keys that are neither torch's nor the test's."""
    return [key for key in store.list_keys() if "/" in key and not any(each in key for each in TORCHS)]


def loads(script: Script) -> Any:
    """A script that loads a checkpoint; a newcomer has what its predecessor got."""
    startup, total, found = script.session.hooks.startup, script.value(), {"epoch": 3}
    if script.session.view.newcomer:
        found = startup.recall(LOADED)
    else:
        startup.remember(LOADED, found)
    dist.all_reduce(total)
    startup.begin_training([])
    return total.item(), found


def test_what_is_written_to_the_store_runs_no_code_in_a_newcomer(job: Job, tmp_path: Path) -> None:
    """Every key that is there, and those that an earlier version had, are a pickle that would run."""
    mark = tmp_path / "ran"
    forged = saved(([], {LOADED: pickle.dumps(Runs(mark))}))
    first = job.run(loads)
    assert first == [(6.0, {"epoch": 3})] * 3
    for key in (*own_keys(job.store), *(f"{FORMER}startup/{rank}" for rank in range(3))):
        job.store.set(key, forged)
    found = job.alone(loads, 1)
    assert not mark.exists(), "it has run"
    assert found == (6.0, {"epoch": 3})


def cut_off(script: Script) -> Any:
    """Ranks 0 and 1 add up once more, after the loss of rank 2; rank 1 hears of it first."""
    rank, session = script.rank, script.session
    dist.barrier()
    script.session.hooks.startup.begin_training([])
    if rank == 2:
        script.die()
    if rank == 0:
        script.hear("has another membership", 1)
    script.recover()
    script.say("has another membership")
    total = script.value()
    dist.all_reduce(total)
    script.say("has all")
    with suppress(RuntimeError):  # the other one has failed, and does not say so
        script.hear("has all", 0, 1)
    return total.item(), session.view.number


def test_a_result_that_somebody_has_written_to_the_store_is_nobodys(job: Job) -> None:
    """It says that rank 0 is through with what rank 1 is about to do, and that it gave 1000."""
    names = ["default_pg", "0", "default_pg/0"]
    said = {name: (5, [], {number: [torch.tensor([1000.0])] for number in range(5)}, 5) for name in names}
    members = [job.start(cut_off, rank) for rank in range(3)]
    assert result_of(members[2]) == DIED
    job.store.set(f"{FORMER}outcomes/1 0", saved(said))
    job.coordinator.tell(generation(1, [0, 1]))
    assert [result_of(one) for one in members[:2]] == [(3.0, 1), (3.0, 1)]


def test_the_store_has_nothing_of_the_plugins_own(job: Job) -> None:
    """After sums, a loss, and another sum."""
    members = [job.start(cut_off, rank) for rank in range(3)]
    assert result_of(members[2]) == DIED
    job.coordinator.tell(generation(1, [0, 1]))
    assert [result_of(one) for one in members[:2]] == [(3.0, 1), (3.0, 1)]
    assert own_keys(job.store) == []
