"""Whether a job that logs was right to end when a stage was lost: is its reason not to replay it true?"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from recycle_plugin.core.vocabulary.deadlines import TICK_S
from recycle_plugin.lab.simulator.simulated_log import FULL
from recycle_plugin.lab.simulator.simulated_spec import SILENCE_S

if TYPE_CHECKING:
    from recycle_plugin.lab.simulator.cluster import Cluster

KNOWN_US = int((SILENCE_S + 2 * TICK_S) * 1e6)  # the most until the coordinator takes a host for gone
NOWHERE = re.compile(r"(?P<what>.*) is in no log")


def rightly(cluster: Cluster) -> bool:
    """Return whether the reason holds for which the job of ``cluster`` ended instead of replaying a stage."""
    ended = cluster.membership.ended
    if ended is not None and ", and nothing was heard for" in ended.reason:
        # data that another replay was to make
        in_vain = cluster.damaged or any(log.broken for log in cluster.logs)
        return bool(in_vain) or any(event.kind == "not_restarted" for _, event in cluster.events)
    said = [event for _, event in cluster.events if event.kind == "recovery"]
    if not said or said[-1].details["way"] != "end":
        return False
    why, stages = said[-1].details["why"], said[-1].details["stages"]
    return any(
        holds(cluster, why, stages) for holds in (_no_checkpoint, _nobody, _ending, _through, _damaged, _taken, _full)
    )


def _no_checkpoint(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    return why.startswith("no checkpoint") and not cluster.watcher.saved_steps


def _nobody(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    return why.startswith("no worker is left") and len(stages) == cluster.scenario.shape.stages


def _ending(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    asked = any(trouble.kind in ("end", "finish", "leave") for trouble in cluster.scenario.troubles)
    return why == "the job is about to end" and (asked or cluster.membership.committed >= cluster.scenario.steps)


def _through(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """Return whether another stage, which would have to replay along, has nothing more to do with the others."""
    return why.endswith("and its script has ended") and cluster.membership.committed >= cluster.scenario.steps


def _damaged(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """Return whether the missing data was damaged, or was gone with all that had drawn it."""
    found = NOWHERE.fullmatch(why)
    if _could_be_made(cluster):
        return False
    gone = (str(datum) for datum in cluster.unlogged if datum.kind == "drawn")
    return found is not None and (found["what"] in cluster.damaged or found["what"] in gone)


def _could_be_made(cluster: Cluster) -> bool:
    """Return whether a stage whose script goes on could have made the missing data again, and has not tried to."""
    said = [event.details for _, event in cluster.events if event.kind in ("recovery", "stalled")]
    lacks = said[-1]["lacks"]
    if lacks is None or lacks in cluster.membership.state.attendance.through:
        return False
    tried: set[int] = set()
    for details in reversed(said[:-1]):
        if details.get("way") != "replay":
            break
        tried.update(details["stages"], map(int, details["along"]))
    return lacks not in tried


def _taken(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """Return whether a host took the missing data along, and nobody could know that when the replay was decided."""
    found, decided = NOWHERE.fullmatch(why), [at for at, event in cluster.events if event.kind == "recovery"][:-1]
    if found is None or found["what"] not in cluster.taken or not decided or _could_be_made(cluster):
        return False
    return decided[-1] < cluster.taken[found["what"]] + KNOWN_US


def _full(cluster: Cluster, why: str, stages: Collection[int]) -> bool:
    """Return whether data that other stages need of a replay found its disk full, and no room was made since."""
    return why.endswith(f"can't be logged: {FULL}") and any(log.refuses() for log in cluster.logs)
