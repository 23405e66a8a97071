"""Oobleck (SOSP'23, arXiv 2309.08125): pipelines of different depths, made from templates for every number of nodes.

Rules from its paper and its public repository (SymbioticLab/Oobleck, pipeline_template.cpp and its instantiator):
* a template for every number of nodes n0 .. n_max; its time is Σ T_s + (2S + k* + 1) T_k* + Σ_{s>=k*} T_s for S stages,
  k* the slowest one (its code's formula, with T_s one micro-batch's forward and backward);
* all multisets of templates with Σ x_i n_i = N and at least f + 1 pipelines are tried;
* the batch is distributed so that the variance of (T_i / S_i) nb_i is least; the plan's time is max T_i nb_i plus the
  all-reduce, and the multiset of least time is taken;
* a change rebuilds the process group and loses the running step.

Its ranking by T_i nb_i knows no fill and drain. What a chosen plan really takes is evaluated here by each pipeline's
1F1B time. ``best=True`` ranks by that too, which flatters Oobleck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recycle_plugin.lab.planner.profile import STATE_BYTES, LayerProfile
from recycle_plugin.lab.simulator.peers.peer_job import PeerJob
from recycle_plugin.lab.simulator.peers.policy import PeerTransition, WorkersChange, count_after


@dataclass(frozen=True)
class Template:
    """A pipeline template. ``cut``: layers per stage. ``stages``: each one's time for a micro-batch, F and B, in us."""

    cut: tuple[int, ...]
    stages: tuple[float, ...]

    @property
    def nodes(self) -> int:
        return len(self.stages)

    @property
    def slowest(self) -> int:
        """The slowest stage, k*; of equal stages the last, as in its code."""
        return max(range(self.nodes), key=lambda stage: (self.stages[stage], stage))

    @property
    def time_us(self) -> float:
        """The microseconds that its code estimates for one pipeline's iteration."""
        slowest = self.slowest
        return sum(self.stages) + (2 * self.nodes + slowest + 1) * self.stages[slowest] + sum(self.stages[slowest:])

    def step_us(self, micro_batches: int, hop_us: float = 0.0) -> float:
        """Return the microseconds of 1F1B: fill and drain, and the slowest stage for the rest; 0 for no micro-batch."""
        if not micro_batches:
            return 0.0
        return sum(self.stages) + (micro_batches - 1) * self.stages[self.slowest] + 2 * (self.nodes - 1) * hop_us


def template(layers: Sequence[LayerProfile], nodes: int) -> Template:
    """Return the template of ``nodes`` nodes, one stage each, cut for the least template time, prefix by prefix (each
    keeps its best cut, as in its own search). O(nodes^2 * layers^2).
    """
    best: dict[int, Template] = {0: Template((), ())}
    for stage in range(nodes):
        row: dict[int, Template] = {}
        for begin, head in best.items():
            total = 0.0
            for end in range(begin + 1, len(layers) - (nodes - stage - 1) + 1):
                total += layers[end - 1].compute_us
                found = Template((*head.cut, end - begin), (*head.stages, total))
                if end not in row or found.time_us < row[end].time_us:
                    row[end] = found
        best = row
    return best[len(layers)]


def multisets(nodes: int, sizes: Sequence[int], least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``nodes`` as a rising sum of at least ``least`` ``sizes``; their number grows quickly."""

    def sums(left: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for place, size in enumerate(sizes):
            if size > left:
                break
            for tail in sums(left - size, sizes[place:]):
                yield (size, *tail)

    return (found for found in sums(nodes, sorted(sizes)) if len(found) >= least)


def distribute(batch: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the micro-batches of each pipeline, ``batch`` in all, with the least variance of weight times number.
    Equalise the products, then add what rounding left where it adds least. Pipelines of one template may differ by one;
    its code gives them the same number.
    """
    harmonic = sum(1 / weight for weight in weights)
    given = [int(batch / harmonic / weight) for weight in weights]
    for _ in range(batch - sum(given)):
        place = min(range(len(weights)), key=lambda one: ((given[one] + 1) * weights[one], one))
        given[place] += 1
    return tuple(given)


@dataclass(frozen=True)
class Instantiation:
    """The chosen pipelines (nodes each), their micro-batches, and microseconds of a step."""

    nodes: tuple[int, ...]
    micro_batches: tuple[int, ...]
    step_us: float


def least_nodes(job: PeerJob) -> int:
    """Return the depth n0 of the shallowest pipeline that fits the accelerator under 1F1B. ValueError if none does."""
    for nodes in range(1, len(job.parts) + 1):
        cut, begin, fits = template(job.parts, nodes).cut, 0, True
        for stage, count in enumerate(cut):
            held = job.parts[begin : begin + count]
            begin += count
            state = STATE_BYTES * sum(layer.parameters for layer in held) // job.profile.gpus_per_worker
            fits &= state + (nodes - stage) * sum(layer.activation_bytes for layer in held) <= job.memory_limit
        if fits:
            return nodes
    raise ValueError(f"{job.name} fits no pipeline of its accelerator")


def instantiate(
    job: PeerJob, nodes: int, templates: Mapping[int, Template], faults: int, best: bool
) -> Instantiation | None:
    """Return the pipelines that Oobleck runs on ``nodes`` nodes, or None if no multiset is possible."""
    batch = job.topology.replicas * job.topology.micro_batches
    closing = max(one + two for one, two in zip(job.costs.reduce, job.costs.step))
    found, least = None, float("inf")
    for sizes in multisets(nodes, sorted(templates), faults + 1):
        chosen = [templates[size] for size in sizes]
        given = distribute(batch, [one.time_us / one.nodes for one in chosen])
        step = closing + max(one.step_us(count, job.costs.communication) for one, count in zip(chosen, given))
        rank = step if best else max(one.time_us * count for one, count in zip(chosen, given)) + closing
        if rank < least:
            found, least = Instantiation(sizes, given, step), rank
    return found


@dataclass(frozen=True)
class Oobleck:
    """The policy of Oobleck. ``speeds``: samples per second by number of nodes, measured or made by :meth:`of_job`;
    missing ones are infeasible. ``batch``: samples a step. ``pause_s``: per change, in addition to the running step's
    loss.
    """

    speeds: Mapping[int, float]
    batch: int
    pause_s: float
    nodes: int
    name: str = "Oobleck"
    source: str = "SOSP'23 and its public repository (peers/oobleck.py)"
    validated: str = "its simulator's averages from its measured tables, within 2%"

    @classmethod
    def of_job(
        cls,
        job: PeerJob,
        pause_s: float,
        fewest: int,
        faults: int = 1,
        best: bool = False,
        name: str = "Oobleck",
        least: int = 0,
    ) -> Oobleck:
        """Return the policy for ``job``: plans for every number of nodes from ``fewest`` to the job's own, and
        templates from n0 up to N - f n0 nodes.

        n0 is ``least``, by default the job's own depth. If memory allows shallower pipelines, these would be another,
        faster job for every policy (seen in a first run: plain data parallelism for 350M). ``least_nodes(job)`` is what
        memory needs.
        """
        smallest = max(least or job.topology.stages, least_nodes(job))
        largest = min(job.workers - faults * smallest, len(job.parts))
        templates = {nodes: template(job.parts, nodes) for nodes in range(smallest, largest + 1)}
        made = {nodes: instantiate(job, nodes, templates, faults, best) for nodes in range(fewest, job.workers + 1)}
        speeds = {nodes: 1e6 * job.batch / one.step_us for nodes, one in made.items() if one is not None}
        return cls(speeds, job.batch, pause_s, job.workers, name)

    def start(self) -> int:
        """Return the state of the whole cluster."""
        return self.nodes

    def speed(self, state: int) -> float:
        """Return the samples per second with ``state`` nodes; 0 if that is infeasible."""
        return self.speeds.get(state, 0.0)

    def change(self, state: int, change: WorkersChange, trained_s: float) -> tuple[int, PeerTransition]:
        """Return the next state, and the change's cost. ``trained_s``: seconds since the last transition's end."""
        speed = self.speed(state)
        lost_s = trained_s % (self.batch / speed) if speed else 0.0
        return count_after(state, change), PeerTransition(self.pause_s, lost_s, "rebuild groups, broadcast layers")
