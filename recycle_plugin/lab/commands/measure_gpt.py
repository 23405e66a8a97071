"""Measure times and memory of a GPT's parts on one device, with the same code for a CPU and an accelerator."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recycle_plugin.core.vocabulary.profile import LayerProfile, Profile, Wire
from recycle_plugin.lab.training.compose import GPTModel, compose
from recycle_plugin.runtime.devices.host import HOST, on_host
from recycle_plugin.runtime.devices.kinds import device_of, kinds
from recycle_plugin.runtime.stage.split_backward import DeferredWeights, PendingWeights

WARM_UP = 3
IN_A_ROW = 4  # micro-batches between two waits for an accelerator: with one, the start of its kernels would be timed
PARTS = ("first", "layer", "last")  # of a GPT: embedding, one layer, head with loss
INSIDE = Wire(5, 240_000)  # NVLink of an A100 at 80%
WAIT_S = 300.0


class Case(NamedTuple):
    """A part of the model as a stage runs it; the backward starts from ``forward(inputs)``."""

    module: nn.Module
    inputs: Tensor
    forward: Callable[[Tensor], Tensor]


class DeviceClock:
    """A clock for work on a device, ``in_a_row`` executions without a wait between them.

    An accelerator executes the work once more before these (``times`` in all). It is then busy when the measured work
    is started, as in a job, where the host is ahead of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._port = device_of(device)
        self.in_a_row, self._before = (1, 0) if device == HOST else (IN_A_ROW, 1)
        self.times = self._before + self.in_a_row

    def of(self, work: Callable[[], object]) -> float:
        """Return the mean seconds of one execution of ``work``."""
        for _ in range(self._before):
            work()
        begun = self._port.event("what comes before")
        for _ in range(self.in_a_row):
            work()
        over = self._port.event("what is measured")
        over.wait(WAIT_S)
        return over.since(begun) / self.in_a_row


def measure(found: argparse.Namespace) -> Profile:
    """Return the profile of ``recycle profile``'s arguments. Raises ValueError."""
    if (kind := found.device or kinds()[-1]) not in kinds():
        raise ValueError(f"--device {kind}: torch finds only {' and '.join(kinds())} here")
    device = torch.device(kind)
    if device == HOST:
        os.environ.setdefault("DS_ACCELERATOR", kind)
    job = compose([f"model={found.model}"])
    if not isinstance(job.model, GPTModel):
        raise ValueError(f"--model {found.model}: not a GPT")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[found.dtype or ("fp32" if device == HOST else "bf16")]
    with_group = _group()
    try:
        return _profile(found, job.model, device, dtype)
    finally:
        if with_group:
            dist.destroy_process_group()


def _profile(found: argparse.Namespace, model: GPTModel, device: torch.device, dtype: torch.dtype) -> Profile:
    memory, whose = _memory_of(device)
    cases = _cases(model, found.micro_batch, device, dtype, found.checkpointing)
    parts = {name: _part(case, DeviceClock(device), found.repeat) for name, case in cases.items()}
    boundary = cases["layer"].inputs
    return Profile(
        name=found.model,
        origin="measured",
        device=_name(device),
        date=datetime.date.today().isoformat(),
        command=" ".join(["recycle", *sys.argv[1:]]),
        dtype="bf16" if dtype is torch.bfloat16 else "fp32",
        micro_batch=found.micro_batch,
        sequence=model.sequence,
        checkpointing=found.checkpointing,
        layers=model.layers,
        boundary_bytes=boundary.numel() * boundary.element_size(),
        gradient_bytes_each=dtype.itemsize,
        inside=INSIDE,
        across=Wire(found.latency, 1e3 * found.bandwidth),
        device_bytes=memory,
        assumptions=(
            "link between hosts: stated by --bandwidth and --latency, not measured",
            whose,
            "inside a host: NVLink of an A100 at 80%, not measured",
        ),
        **parts,
    )


def layer(
    name: str, batch: int, device: torch.device, dtype: torch.dtype, checkpointing: bool, repeat: int
) -> LayerProfile:
    """Return the costs of a transformer layer of the model ``name``, for a micro-batch of ``batch`` sequences."""
    model = compose([f"model={name}"]).model
    assert isinstance(model, GPTModel), f"{name} is no GPT"
    with_group = _group()
    try:
        return _part(
            _cases(model, batch, device, dtype, checkpointing, ("layer",))["layer"], DeviceClock(device), repeat
        )
    finally:
        if with_group:
            dist.destroy_process_group()


def _cases(
    model: GPTModel,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    wanted: Sequence[str] = PARTS,
) -> dict[str, Case]:
    """Return those of embedding, one layer and head with loss that are ``wanted``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron's, on what is not installed
        from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers, gpt_loss

        # a tied head takes as long
        shape = GPTShape(**{**model.model_dump(exclude={"kind"}), "layers": 1, "tied": False})
        specs = dict(zip(PARTS, gpt_layers(shape, params_dtype=dtype)))
        made = {name: specs[name].build().to(device) for name in wanted}
    ids = torch.randint(0, shape.vocabulary, (batch, shape.sequence), device=device)
    hidden = torch.randn(shape.sequence, batch, shape.hidden, device=device, dtype=dtype)

    def forward(name: str) -> Callable[[Tensor], Tensor]:
        module = made[name]
        if name == "last":
            return lambda x: gpt_loss(module(x), ids)
        return (lambda x: checkpoint(module, x, use_reentrant=False)) if checkpointing and name == "layer" else module

    return {name: Case(module, ids if name == "first" else hidden, forward(name)) for name, module in made.items()}


def _part(case: Case, clock: DeviceClock, repeat: int) -> LayerProfile:
    """Return medians. Fused and split runs alternate, so that a change of the machine's speed affects both."""
    fused, split = [], []
    for _ in range(WARM_UP + repeat):
        fused.append(_once(case, clock, None))
        deferred = DeferredWeights(case.module)
        split.append(_once(case, clock, deferred))
        deferred.restore()
    forward, gradient, weight = (1e6 * median(column[WARM_UP:]) for column in zip(*split))
    backward = 1e6 * median(row[1] for row in fused[WARM_UP:])
    held, pending = _memory(case, clock.device)
    parameters = sum(parameter.numel() for parameter in case.module.parameters())
    return LayerProfile(
        forward, gradient, weight, backward, 1e6 * _step(case.module, clock, repeat), parameters, held, pending
    )


def _once(case: Case, clock: DeviceClock, deferred: DeferredWeights | None) -> tuple[float, float, float]:
    """Return seconds of F, I and W of one micro-batch; of F, B and 0 if the backward is not split."""
    inputs, outputs, left = [_inputs(case) for _ in range(clock.times)], deque[Tensor](), deque[PendingWeights]()

    def forward() -> None:
        with nullcontext() if deferred is None else deferred.forward():
            outputs.append(case.forward(inputs.pop()))

    def backward() -> None:
        with nullcontext() if deferred is None else deferred.hold() as pending:
            outputs.popleft().backward(gradient)
        left.append(pending)

    taken = clock.of(forward)
    gradient = torch.randn_like(outputs[0])
    halves = clock.of(backward)
    return taken, halves, 0.0 if deferred is None else clock.of(lambda: left.popleft().run())


def _memory(case: Case, device: torch.device) -> tuple[int, int]:
    """Return the bytes that a micro-batch holds after F, and after I, with a split backward. The first is from the
    allocator on an accelerator, else from the tensors that autograd saves.
    """
    deferred, x = DeferredWeights(case.module), _inputs(case)
    before, held = _allocated(device), _Held(case.module)
    with held, deferred.forward():
        output = case.forward(x)
    size = held.nbytes(x) if on_host(x) else _allocated(device) - before + x.nbytes
    gradient = torch.randn_like(output)
    with deferred.hold() as pending:
        output.backward(gradient)
    left = pending.nbytes
    pending.run()
    deferred.restore()
    return size, left


def _inputs(case: Case) -> Tensor:
    x = case.inputs.detach().clone()
    return x.requires_grad_(x.is_floating_point())


class _Held(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward saves for its backward, without parameters, each storage once."""

    def __init__(self, module: nn.Module) -> None:
        own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                self._sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(keep, lambda tensor: tensor)

    def nbytes(self, x: Tensor) -> int:
        return sum({**self._sizes, x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}.values())


def _allocated(device: torch.device) -> int:
    return 0 if device == HOST else torch.get_device_module(device).memory_allocated(device)


def _step(module: nn.Module, clock: DeviceClock, repeat: int) -> float:
    """Return seconds of an AdamW step on fp32 copies, copied back to parameters of another type."""
    own = list(module.parameters())
    masters = [parameter.detach().float().clone() for parameter in own]
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-4)

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        if own[0].dtype is not torch.float32:
            torch._foreach_copy_(own, masters)

    return median([clock.of(step) for _ in range(WARM_UP + repeat)][WARM_UP:])


# --- group and names -------------------------------------------------------------------------------------


def _group() -> bool:
    """Make a process group of this process alone if there is none; return whether it was made."""
    if dist.is_initialized():
        return False
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return True


def _memory_of(device: torch.device) -> tuple[int, str]:
    """Return bytes and their meaning: a device's own memory, or its host's available memory."""
    if device != HOST:
        return device_of(device).memory().total, "memory: all of the device's"
    return psutil.virtual_memory().available, "memory: what this host had available; workers of one host share it"


def _name(device: torch.device) -> str:
    if device != HOST:
        return torch.get_device_module(device).get_device_name(device)
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"
