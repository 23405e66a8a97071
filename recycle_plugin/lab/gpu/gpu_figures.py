"""Stages of ``scripts/on_gpu`` that measure one process on the device: splits, undo, copies, randomness."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from recycle_plugin.lab.checks.rows import Row, judged
from recycle_plugin.lab.gpu.copies import bandwidths
from recycle_plugin.lab.gpu.layer_times import layer_times
from recycle_plugin.lab.gpu.place import StagePlace
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.randomness import keyed
from recycle_plugin.runtime.state.stage_state import OptimizerState, StageState, of_parameters
from recycle_plugin.runtime.state.undo import KINDS

GOAL = 1.02  # of a split backward's time to a fused one's
MODELS = {"gpt3_medium": 4, "gpt3_3_35b": 1, "gpt3_6_7b": 1}  # sequences of a micro-batch
REHEARSED = {"gpt_tiny": 1}


def device_at(place: StagePlace) -> Device:
    """Return this process's device."""
    return device_of(torch.device(place.device))


def models(place: StagePlace) -> dict[str, int]:
    """Return the models to measure, each with the sequences of a micro-batch."""
    return REHEARSED if place.rehearsal else MODELS


def split(place: StagePlace) -> list[Row]:
    """Compare split and fused backwards of one layer of each model in bf16."""
    where, repeat = device_at(place).where, 2 if place.rehearsal else 15
    rows = []
    for name, batch in models(place).items():
        for checkpointing in (False, True):
            taken = layer_times(name, batch, where, torch.bfloat16, checkpointing, repeat)
            ratio = (taken.input + taken.weight) / taken.fused
            figures = {
                "ratio": round(ratio, 4),
                "input_us": round(taken.input, 1),
                "weight_us": round(taken.weight, 1),
                "fused_us": round(taken.fused, 1),
            }
            text = f"split is {ratio:.3f} x fused, {taken.fused / 1e3:.3f} ms"
            called = f"{name}{', checkpointing' * checkpointing}"
            slow = f"{text}; at most {GOAL} is the goal" if ratio > GOAL else ""
            rows.append(
                Row(called, None, text, figures=figures)
                if place.rehearsal
                else judged(called, slow, text, "send this report", **figures)
            )
    return rows


def undo(place: StagePlace) -> list[Row]:
    """Measure bytes and milliseconds of each way to take an AdamW step back, beside those of the step. As in a job, a
    record may begin before the step's gradients are computed; matrix products stand for that computation.
    """
    device, width, layers = device_at(place), 16 if place.rehearsal else 1024, 1 if place.rehearsal else 8
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    return [_undo(device, kind, shapes, place.rehearsal) for kind in KINDS]


def _undo(device: Device, kind: str, shapes: Sequence[tuple[int, int]], rehearsal: bool) -> Row:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device.where)) for shape in shapes
    ]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    called = {parameter: str(place) for place, parameter in enumerate(parameters)}
    weights = of_parameters("weights", {name: parameter for parameter, name in called.items()})
    record = KINDS[kind](StageState(lambda: 0, OptimizerState(optimizer, called), [weights]))
    kept = [parameter.detach().clone() for parameter in parameters]
    matrix = torch.ones(4, 4) if rehearsal else torch.ones(4096, 4096)
    matrix = matrix.to(device.where)

    def gradients() -> None:
        for _ in range(1 if rehearsal else 40):
            torch.mm(matrix, matrix)

    def begun() -> None:
        record.prepare()
        gradients()

    calls = (gradients, begun, record.before_step, optimizer.step, record.restore)
    times = [[_milliseconds(device, call) for call in calls] for _ in range(7)][2:]
    alone, beside, before, step, restore = (round(median(column), 3) for column in zip(*times))
    each = round(record.held_bytes / sum(parameter.numel() for parameter in parameters), 2)
    apart = max((one - other).abs().max().item() for one, other in zip(parameters, kept))
    wrong = (
        f"parameters differ by {apart:.2g} after steps that were taken back"
        if not apart <= (0.0 if record.exact else 1e-5)
        else f"{before:g} ms before a step of {step:g} ms: what was begun {alone:g} ms earlier is not over"
        if kind == "host_snapshot" and before > step and not rehearsal
        else ""
    )
    return judged(
        f"undo: {kind}",
        wrong,
        f"{each:g} bytes a parameter, {before:g} ms before a step of {step:g} ms, {restore:g} ms to take it back; "
        f"products of {alone:g} ms take {beside:g} ms meanwhile",
        "send this report",
        bytes_a_parameter=each,
        compute_ms=alone,
        compute_beside_ms=beside,
        before_ms=before,
        step_ms=step,
        restore_ms=restore,
    )


def copies(place: StagePlace) -> list[Row]:
    """Measure bandwidths of pinned copies, alone and beside compute."""
    sizes = {"size": 1 << 20, "products": 2, "side": 64} if place.rehearsal else {"size": 256 << 20}
    found = bandwidths(device_at(place), **sizes)
    text = ", ".join(f"{name} {value:g}" for name, value in found.items())
    return [Row("copies", None, text, figures=found)]


def rng(place: StagePlace) -> list[Row]:
    """Measure the cost of keying a forward's random numbers by its micro-batch."""
    device, count = device_at(place), 20 if place.rehearsal else 500

    def by_key() -> None:
        for number in range(count):
            with keyed(number, device):
                pass

    each_us = round(1e3 * median(_milliseconds(device, by_key) for _ in range(5)) / count, 2)
    x = torch.ones(64, device=device.where)
    with keyed(7, device):
        first = torch.nn.functional.dropout(x)
    after = [generator.get_state() for generator in device.generators]
    with keyed(7, device):
        again = torch.nn.functional.dropout(x)
    same = torch.equal(first, again) and all(map(torch.equal, after, (one.get_state() for one in device.generators)))
    return [
        judged(
            "keyed forwards",
            "" if same else "the same key gives other masks, or the generators are not restored",
            f"{each_us:g} us each",
            "send this report",
            us=each_us,
        )
    ]


def _milliseconds(device: Device, work: Callable[[], object]) -> float:
    device.event("what was before").wait(60)
    begun = time.perf_counter()
    work()
    device.event("what is timed").wait(60)
    return 1e3 * (time.perf_counter() - begun)
