"""A failure trace, compressed into a run of a few steps, as named kills of real workers. Losses only."""

from __future__ import annotations

import random
from collections.abc import Sequence

from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.core.vocabulary.ids import MicroBatch
from recycle_plugin.core.vocabulary.instruction import Instruction, Op
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator.peers import published


def of_trace(replicas: int, stages: int, micro_batches: int, steps: int, seed: int) -> list[str]:
    """Return the GCP trace of the ReCycle paper as kills in ``steps`` steps: for ``faults=trace``."""
    topology = Topology(replicas, stages, micro_batches)
    return [str(fault) for fault in kills(published.TRACE, published.TRACE_ENDS_H, topology, steps, seed)]


def kills(
    points: Sequence[tuple[float, int]], ends_h: float, topology: Topology, steps: int, seed: int = 0
) -> list[Fault]:
    """Return the losses of ``points`` (hour, workers), stretched over ``steps`` steps and this topology, in order of
    time.

    Workers that come back in the trace don't here: a loss counts when the trace falls below its lowest point so far.
    When it has lost k of its N workers, this job has lost the nearest whole number to k/N of its own. No kill empties a
    stage. A worker dies before a forward of its own, in the step's share of the trace's time; nobody dies in the first
    step.
    """
    draw, view = random.Random(seed), topology.full()
    faults: list[Fault] = []
    workers, most = points[0][1], topology.replicas * topology.stages
    for hour, left in points:
        step = min(steps, 2 + int(hour / ends_h * (steps - 1)))
        wanted = (2 * (workers - left) * most + workers) // (2 * workers)
        while len(faults) < wanted:
            spared = [seat for seat in sorted(view.live) if len(view.live_replicas(seat.stage)) > 1]
            if not spared:
                return faults
            seat = draw.choice(spared)
            view = view.without(seat)
            own = MicroBatch(seat.replica, draw.randrange(topology.micro_batches))
            faults.append(Fault("kill", seat, "before", str(Instruction(Op.F, seat.stage, own, step))))
    return faults
