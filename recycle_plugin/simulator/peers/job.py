"""A training job as the policies see it, and an analytic cost model for GPTs.

Assumptions of :func:`gpt_job`: bf16, flash attention, no activation checkpointing, tensor-parallel size 1.
Times are matrix products at a fixed share of peak; norms, dropout and the like are part of that share.
Layers (embedding and head are layers too) are cut so that the slowest stage is fastest.  The gradient
sum is a ring over the replicas in bf16; Adam touches 28 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

from recycle_plugin.core.cost import CostModel
from recycle_plugin.core.plan import Policy
from recycle_plugin.core.topology import Topology
from recycle_plugin.planner import plan
from recycle_plugin.simulator.peers.machine import Accelerator

STOCK = Policy(split_backward=False, stagger_optimizer=False, reroute=False)
STATE_BYTES = 16  # per parameter: bf16 weight and gradient, fp32 weight and two moments
UPDATE_BYTES = 28  # per parameter and step


@dataclass(frozen=True)
class Layer:
    """Microseconds of a micro-batch's F, I and W, parameters, and bytes that one micro-batch holds until its backward."""

    forward: float
    input: float
    weight: float
    parameters: float
    activation_bytes: float

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class Job:
    """``topology`` is that of the fault-free job; samples are sequences."""

    name: str
    topology: Topology
    costs: CostModel
    micro_batch_size: int
    layers: tuple[Layer, ...]
    cut: tuple[int, ...]
    accelerator: Accelerator

    @property
    def workers(self) -> int:
        return self.topology.replicas * self.topology.stages

    @property
    def batch(self) -> int:
        """Samples a step."""
        return self.topology.replicas * self.topology.micro_batches * self.micro_batch_size

    @property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers)

    def stage_layers(self, stage: int) -> tuple[Layer, ...]:
        return self.layers[sum(self.cut[:stage]) : sum(self.cut[: stage + 1])]

    def state_bytes(self, stage: int) -> float:
        return STATE_BYTES * sum(layer.parameters for layer in self.stage_layers(stage))

    @property
    def largest_state(self) -> float:
        return max(map(self.state_bytes, range(self.topology.stages)))

    def memory_bytes(self, stage: int, micro_batches: int) -> float:
        """State and ``micro_batches`` micro-batches' activations on a worker of ``stage``."""
        return self.state_bytes(stage) + micro_batches * sum(layer.activation_bytes for layer in self.stage_layers(stage))

    @cached_property
    def fault_free_us(self) -> int:
        """Microseconds a step of fault-free 1F1B: the papers' baseline."""
        return plan(self.topology.full(), self.costs, STOCK).period_us

    @property
    def fault_free(self) -> float:
        """Samples per second of fault-free 1F1B."""
        return 1e6 * self.batch / self.fault_free_us

    def pipelines(self, count: int) -> float:
        """Samples per second of 1F1B with the whole batch on ``count`` pipelines; 0 for none."""
        if count < 1:
            return 0.0
        whole = self.topology
        each = -(-whole.replicas * whole.micro_batches // count)
        return 1e6 * self.batch / plan(Topology(count, whole.stages, each).full(), self.costs, STOCK).period_us


def gpt_job(
    name: str,
    layers: int,
    hidden: int,
    sequence: int,
    vocabulary: int,
    topology: Topology,
    micro_batch_size: int,
    accelerator: Accelerator = Accelerator(),
    tensor: int = 1,
) -> Job:
    """The analytic job.  ``tensor``: accelerators that share one seat and its work, at no cost of their own."""
    stack = gpt_layers(layers, hidden, sequence, vocabulary, micro_batch_size, accelerator, tensor)
    cut = even_cut([layer.total for layer in stack], topology.stages)
    stages = [stack[sum(cut[:stage]) : sum(cut[: stage + 1])] for stage in range(topology.stages)]

    def each(name: str) -> tuple[int, ...]:
        return tuple(round(sum(getattr(layer, name) for layer in stage)) for stage in stages)

    replicas, held = topology.replicas, [sum(layer.parameters for layer in stage) for stage in stages]
    ring = 2 * (replicas - 1) / replicas * 2 / accelerator.link_rate * 1e6
    costs = CostModel(
        each("forward"), each("input"), each("weight"),
        communication=round(accelerator.latency_us + micro_batch_size * sequence * hidden * 2 / accelerator.link_rate * 1e6 / tensor),
        reduce=tuple(round(ring * count + 2 * (replicas - 1) * accelerator.latency_us) for count in held),
        step=tuple(round(UPDATE_BYTES * count / accelerator.memory_rate * 1e6) for count in held),
        dispatch=accelerator.dispatch_us,
    )  # fmt: skip
    return Job(name, topology, costs, micro_batch_size, tuple(stack), cut, accelerator)


def gpt_layers(
    layers: int, hidden: int, sequence: int, vocabulary: int, micro_batch_size: int, accelerator: Accelerator, tensor: int = 1
) -> list[Layer]:
    """Embedding, ``layers`` blocks, head; parameters and bytes per accelerator of a tensor-parallel group."""
    tokens, rate = micro_batch_size * sequence, accelerator.peak_flops * accelerator.efficiency / 1e6 * tensor
    linear, attention = 24 * tokens * hidden**2 / rate, 4 * tokens * sequence * hidden / rate
    logits = 2 * tokens * hidden * vocabulary / rate
    block = Layer(linear + attention, linear + 2 * attention, linear, (12 * hidden**2 + 13 * hidden) / tensor, 34 * tokens * hidden / tensor)
    first = Layer(0, 0, 0, (vocabulary + sequence) * hidden / tensor, 2 * tokens * hidden / tensor)
    last = Layer(logits, logits, logits, vocabulary * hidden / tensor, 4 * tokens * vocabulary / tensor)
    return [first, *[block] * layers, last]


def even_cut(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """Numbers of consecutive layers per stage such that the slowest stage is fastest, and of those the most even one."""
    if stages > len(times):
        raise ValueError(f"{stages} stages for {len(times)} layers")
    best: list[dict[int, tuple[tuple[float, float], tuple[int, ...]]]] = [{0: ((0.0, 0.0), ())}]
    for _ in range(stages):
        row: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for end in range(1, len(times) + 1):
            for begin, ((slowest, squares), cut) in best[-1].items():
                if begin < end:
                    stage = sum(times[begin:end])
                    found = ((max(slowest, stage), squares + stage * stage), (*cut, end - begin))
                    row[end] = min(row.get(end, found), found)
        best.append(row)
    return best[stages][len(times)][1]
