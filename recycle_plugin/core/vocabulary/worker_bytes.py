"""The memory that a worker needs for the parameters of its stage, by purpose: between steps, and within one.

The *state* is always there: weights, fp32 masters of weights in fewer bits, and the optimizer's state. Besides:

* the *sum* of a step's gradients over the stage's workers, in fp32, from REDUCE until all stages are known to have
  applied the step: a peer may lack it, and an undo may need it (runtime/stage/gradients.py);
* *undo*: copies of what the step changes, beside the state or on the host, in buffers that stay while there is nothing
  to undo. Turning the optimizer's rule round takes only the sum;
* *contributions*: this worker's part of the next sum, from a step's first weight gradient on, and beside them the *new*
  ones, of one micro-batch, while they are in fewer bits (runtime/stage/masters.py);
* the *second* buffer that REDUCE writes to, since an interrupted sum must leave contributions as they were;
* *scaled*: gradients as they are applied, if they are clipped or unscaled; and what the optimizer *works* with.

So most is held at one of three moments: computing, summing, stepping. In the first two the last step's sum may still be
there, staggered steps or not: news of its commit comes while the next gradients are computed.

Exact mode has contributions in one buffer for each block (core/vocabulary/blocks.py), and copies a bucket of them to
add them up. After a loss a worker has more micro-batches and blocks, and else no more. Shared weights have one more
sum.

Not counted: what a micro-batch holds and boundary tensors, which depend on layers; and
results of the script's last collectives, 4 MiB for each process group (runtime/collectives/outcomes.py).
tests/cluster/test_memory.py compares all of this with measured bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recycle_plugin.core.vocabulary.stage_bytes import StageBytes

WEIGHTS = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTERS = {"fp32": 0, "bf16": 4, "fp16": 4}
GRADIENT = 4
ADAM = 8
"""Bytes of a parameter; Adam has m and v in fp32."""
EXACT_BUCKET = 1 << 22  # numbers that exact mode copies at once, in whole parameters
SUM_PIECE = 1 << 20  # numbers that go through the host at once, and that exact mode adds at once


@dataclass(frozen=True)
class WorkerBytes:
    """The memory of a worker for a stage of ``parameters`` parameters, all trained by Adam, by its job's settings.

    ``blocks``: exact mode's; None if it is off. ``scales``: gradients are clipped or unscaled. ``work``: bytes that the
    optimizer takes in its step. ``apart``: the device's memory is not the host's, through which gradients are summed.
    ``measured``: what a run has measured, in place of parameters with Adam. All results are in bytes.
    """

    parameters: int
    dtype: str
    undo: str
    blocks: int | None = None
    scales: bool = False
    work: int = 0
    apart: bool = False
    measured: StageBytes | None = None

    @classmethod
    def of_run(cls, of: StageBytes, undo: str, blocks: int | None = None, scales: bool = False) -> WorkerBytes:
        """Return the bytes of a worker of a stage that a run has measured. On an accelerator torch's optimizers work on
        all parameters at once, on the host on one after the other.
        """
        work = of.gradient if of.apart else 2 * of.largest
        return cls(of.gradient // GRADIENT, "fp32", undo, blocks, scales, work, of.apart, of)

    @property
    def gradient(self) -> int:
        """One gradient of all parameters, in fp32 unless measured."""
        return GRADIENT * self.parameters if self.measured is None else self.measured.gradient

    @property
    def state(self) -> dict[str, int]:
        """The bytes that a step changes, by part; if measured, also those that no step changes."""
        if (of := self.measured) is not None:
            return {"weights": of.weights, "masters": of.masters, "optimizer": of.optimizer, "frozen": of.frozen}
        each = {"weights": WEIGHTS[self.dtype], "masters": MASTERS[self.dtype], "optimizer": ADAM}
        return {part: size * self.parameters for part, size in each.items()}

    @property
    def _copies(self) -> int:
        """The part of the state that is copied to take a step back: weights with masters are derived from these."""
        return (self.state["masters"] or self.state["weights"]) + self.state["optimizer"]

    @property
    def on_host(self) -> int:
        """The bytes in host memory of the undo record, if the device has its own memory."""
        return self._copies * (self.undo == "host_snapshot") * self.apart

    @property
    def settled(self) -> dict[str, int]:
        """By part, once the last step is committed."""
        here = self.undo == "snapshot" or (self.undo == "host_snapshot" and not self.apart)
        return self.state | {"undo": self._copies * here}

    @property
    def between(self) -> dict[str, int]:
        """By part, between two steps."""
        return self.settled | {"sum": self.gradient}

    @property
    def contributions(self) -> int:
        return self.gradient * (self.blocks or 1)

    def computing(self, committed: bool = False) -> dict[str, int]:
        """Return the bytes by part in a step's last W. ``committed``: the step before is known to be committed."""
        new = self.state["weights"] if self.state["masters"] else 0
        return (self.settled if committed else self.between) | {"contributions": self.contributions, "new": new}

    def summing(self, committed: bool = False) -> dict[str, int]:
        """Return the bytes by part in REDUCE. ``committed``: the step before is known to be committed."""
        return self.computing(committed) | {"new": 0, "second": self.gradient, "pieces": self._pieces}

    @property
    def stepping(self) -> dict[str, int]:
        """By part, in STEP."""
        return self.between | {"scaled": self.gradient * self.scales, "work": self.work}

    def peaks(self, held: int = 0, committed: bool = False) -> Mapping[str, int]:
        """Return the most at each moment of a step. ``held``: what micro-batches hold while gradients are computed."""
        parts = {"computing": self.computing(committed), "summing": self.summing(committed), "stepping": self.stepping}
        return {moment: sum(of.values()) + held * (moment == "computing") for moment, of in parts.items()}

    @property
    def _pieces(self) -> int:
        """Exact mode's copies of a bucket of each block, and pieces of the sum. On a device apart one piece comes back
        from the host; on the host exact mode's pieces come, go (of several blocks a copy) and are given out, and one is
        on its way.
        """
        blocks, piece = self.blocks or 0, min(self.parameters, SUM_PIECE)
        count = blocks + (blocks if blocks > 1 else 0) + 1 + (self.parameters > piece) if blocks else 0
        return GRADIENT * (blocks * min(self.parameters, EXACT_BUCKET) + piece * (1 if self.apart else count))
