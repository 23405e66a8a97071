"""Bamboo (NSDI'23): every node also computes its successor's stage, so that a lone failure costs time but no state.

Rules from its paper and public repository:
* redundant computing leaves a part of the fault-free rate: 0.65 in ReCycle's figure, 0.25 to 0.32 in Oobleck's;
* a node that covers two stages works 1.5 times as long on each micro-batch;
* losing such a node, or the one before it, is fatal: 30 s of global rendezvous;
* it reconfigures (the same rendezvous) when 2 x overloaded / active > 5%, or when another pipeline fits;
* it runs out of memory if 2 x (16 .. 18 bytes/parameter) / PP + activations exceed the accelerator.

After a rendezvous the nodes form whole pipelines and, if at least half of a pipeline's nodes are left, one more with
merged stages; the batch is split by the pipelines' rates. This reading of the rules was chosen among three with the
published fractions in view. Its constants are Bamboo's, and none was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_plugin.lab.simulator.peers.peer_job import PeerJob
from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange

FAULT_FREE_IN_RECYCLE = 0.651
MERGED = 1.5
RENDEZVOUS_S = 30.0
OVERLOADED = 0.05

KNOWN = "GPT-3 350M"  # on 24 GPUs: the only published degraded fractions


@dataclass(frozen=True)
class Nodes:
    """The nodes of a Bamboo job: ``live``; of these ``overloaded`` cover two stages since the last rendezvous."""

    live: int
    overloaded: int = 0


@dataclass(frozen=True)
class Bamboo:
    """The policy of Bamboo. ``rate``: its speed without failures, as a part of ``fault_free`` 1F1B (samples per
    second).
    """

    fault_free: float
    replicas: int
    stages: int
    step_s: float
    rate: float = FAULT_FREE_IN_RECYCLE
    fits: bool = True
    name: str = "Bamboo"
    source: str = "NSDI'23 and its public repository"
    validated: str = (
        "fault-free rate as published; "
        "degraded within 6% of ReCycle's figure at 17 to 23 GPUs, 11 to 14% too fast below"
    )

    @classmethod
    def of_job(cls, job: PeerJob, rate: float = FAULT_FREE_IN_RECYCLE, name: str = "Bamboo") -> Bamboo:
        """Return the policy for ``job``, validated only for GPT-3 350M on 24 GPUs, with known published fractions."""
        shape, known = job.topology, job.name == KNOWN and job.workers == 24 and rate == FAULT_FREE_IN_RECYCLE
        return cls(
            job.fault_free,
            shape.replicas,
            shape.stages,
            job.fault_free_us / 1e6 / rate,
            rate,
            fits_memory(job),
            name,
            validated=cls.validated if known else "",
        )

    def start(self) -> Nodes:
        """Return the state of the whole cluster."""
        return Nodes(self.replicas * self.stages)

    def speed(self, state: Nodes) -> float:
        """Return the samples per second in ``state``; 0 if that does not fit the memory."""
        if not self.fits:
            return 0.0
        slower = MERGED if state.overloaded else 1.0
        return self.fault_free * self.rate * self._pipelines(state.live + state.overloaded) / self.replicas / slower

    def change(self, state: Nodes, change: WorkersChange, trained_s: float) -> tuple[Nodes, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        live, overloaded, fatal = state.live, state.overloaded, False
        for draw in change.lost:
            fatal |= draw * live < 2 * overloaded
            live, overloaded = live - 1, overloaded + 1
        live += change.joined
        more = live // self.stages > state.live // self.stages
        if fatal or more or (live and 2 * overloaded / live > OVERLOADED):
            step = self.step_s if change.lost else 0.0
            return Nodes(live), PeerTransition(
                RENDEZVOUS_S, trained_s % step if step else 0.0, "fatal, rendezvous" if fatal else "rendezvous"
            )
        return Nodes(live, overloaded), PeerTransition(0.0, 0.0, "successor takes over" if change.lost else "stands by")

    def _pipelines(self, nodes: int) -> float:
        """Return the rate of ``nodes`` nodes in units of a whole pipeline's."""
        whole, left = divmod(nodes, self.stages)
        if whole >= self.replicas:
            return self.replicas
        return whole + (1 / MERGED if 2 * left >= self.stages else 0.0)


def fits_memory(job: PeerJob, bytes_per_parameter: float = 16.0) -> bool:
    """Return whether twice the stage's state, and 1F1B's activations of one stage, fit the accelerator."""
    stages = job.topology.stages
    activations = max((stages - stage) * size for stage, size in enumerate(job.costs.activation_bytes))
    return 2 * bytes_per_parameter * job.parameters / stages + activations <= job.memory_limit
