"""Whether a job that logs was right to end, where a stage is lost whole: it says why that can't be replayed, and here
the reason is compared with what has happened.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.simulator.simulated_log import FULL
from recycle_plugin.simulator.simulated_worker import SILENCE_S

if TYPE_CHECKING:
    from recycle_plugin.simulator.cluster import Cluster

KNOWN_US = int((SILENCE_S + 2 * TICK_S) * 1e6)  # until the coordinator takes a host for gone, at most
LACKS = re.compile(r"the log of rank (?P<rank>\d+) lacks something of step (?P<step>\d+): (?P<why>.*)")
NOWHERE = re.compile(r"(?P<what>.*) is in no log")


def rightly(cluster: Cluster) -> bool:
    """Whether the reason holds for which the job of ``cluster`` has ended instead of replaying a stage."""
    ended = cluster.membership.ended
    if ended is not None and ", and nothing was heard for" in ended.reason:
        in_vain = cluster.damaged or any(
            log.broken for log in cluster.logs
        )  # what another one was to make in its replay
        return bool(in_vain) or any(event.kind == "not_restarted" for _, event in cluster.events)
    said = [event for _, event in cluster.events if event.kind == "recovery"]
    if not said or said[-1].details["way"] != "end":
        return False
    why, stages = said[-1].details["why"], said[-1].details["stages"]
    return any(holds(cluster, why, stages) for holds in (_no_checkpoint, _nobody, _ending, _damaged, _taken, _lacks))


def _no_checkpoint(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    return why.startswith("no checkpoint") and not cluster.watcher.saved_steps


def _nobody(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    return why == "nobody is left" and len(stages) == cluster.scenario.shape.stages


def _ending(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    asked = any(trouble.kind in ("end", "leave") for trouble in cluster.scenario.troubles)
    return why == "the job is about to end" and (asked or cluster.membership.committed >= cluster.scenario.steps)


def _damaged(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """It was damaged; or nobody was left of those who had drawn it, and took it with them."""
    found = NOWHERE.fullmatch(why)
    gone = (str(datum) for datum in cluster.unlogged if datum.kind == "drawn")
    return found is not None and (found["what"] in cluster.damaged or found["what"] in gone)


def _taken(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """A host has taken it along, and when it was decided to replay, nobody could know yet that it was gone."""
    found, decided = NOWHERE.fullmatch(why), [at for at, event in cluster.events if event.kind == "recovery"][:-1]
    if found is None or found["what"] not in cluster.taken or not decided:
        return False
    return decided[-1] < cluster.taken[found["what"]] + KNOWN_US


def _lacks(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """It lacks that, since its disk was full, or its writer was lost before it had said that all was there; and no
    later checkpoint makes up for it.
    """
    found = LACKS.fullmatch(why)
    if found is None:
        return False
    rank, step = int(found["rank"]), int(found["step"])
    stage = cluster.workers[rank].seat.stage
    if stage in stages or not {stage - 1, stage + 1}.intersection(stages):
        return False
    if step <= max(cluster.watcher.saved_steps, default=0) or step > cluster.membership.committed:
        return False
    if found["why"].endswith(", and is gone with that"):
        return rank in cluster.lost_hosts and cluster.scenario.logs_apart
    if found["why"] == FULL:
        return any(step >= min(log.broken, default=step + 1) for log in cluster.logs if log.worker.rank == rank)
    lost = [worker for worker in cluster.membership.lost if worker.rank == rank]
    return any(cluster.logged.get(worker, 0) < step for worker in lost)
