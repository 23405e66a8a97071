"""``recycle profile``: measure the costs of a GPT's parts on this machine's device, for planner and simulator."""

from __future__ import annotations

import argparse
from pathlib import Path

from recycle_plugin.commands.parsers import command
from recycle_plugin.core.vocabulary.profile import LayerProfile, Profile

DESCRIPTION = """\
Measure embedding, one transformer layer and the head of a GPT on this machine's device, one micro-batch at a time: F,
and backward split (I, W) and fused (B), the optimizer's step, the bytes of a boundary tensor, what a micro-batch holds
from F to I and from I to W, and the device's memory.  Medians of --repeat runs.

recycle profile --model gpt3_medium --dtype bf16 --micro-batch 4 --out gpt3_medium.json
recycle plan --profile gpt3_medium.json --pp 4 --dp 6 --micro-batches 12 --lost 1.2 --cap auto

Where there is no such device, --preset writes an analytic A100's figures of a named model: gpt3_medium, gpt3_3_35b,
gpt3_6_7b, gpt_18_4b, gpt_39_1b, gpt_76_1b, gpt_145_6b, each also with -ckpt for activation checkpointing.

A job takes it with "recycle": {"costs": "gpt3_medium.json"}.

Links can't be measured by one process: --bandwidth and --latency are taken on trust, and the file says so
(scripts/check_cluster measures them).
"""


def add(commands: argparse._SubParsersAction) -> None:
    made = command(commands, "profile", "measure a GPT's costs on the device at hand", DESCRIPTION, run)
    made.add_argument(
        "--model",
        default="gpt_tiny",
        metavar="NAME",
        help="a GPT of configs/model: gpt_tiny, gpt3_medium, gpt3_3_35b, gpt3_6_7b (default: gpt_tiny)",
    )
    made.add_argument("--preset", metavar="NAME", help="measure nothing: an analytic A100's, see above")
    made.add_argument("--micro-batch", type=int, default=1, metavar="B", help="sequences of a micro-batch (default: 1)")
    made.add_argument("--dtype", choices=["bf16", "fp32"], default=None, help="default: fp32 on a CPU, else bf16")
    made.add_argument("--device", metavar="KIND", help="default: the accelerator that torch finds, or else the CPU")
    made.add_argument(
        "--checkpointing", action="store_true", help="with activation checkpointing of the transformer layers"
    )
    made.add_argument(
        "--repeat",
        type=int,
        default=20,
        metavar="N",
        help="measured runs of each part, after 3 that do not count (default: 20)",
    )
    made.add_argument("--bandwidth", type=float, default=9.0, metavar="GB/S", help="between hosts (default: 9)")
    made.add_argument("--latency", type=float, default=30.0, metavar="US", help="between hosts (default: 30)")
    made.add_argument("--out", type=Path, default=None, metavar="FILE", help="write the profile as JSON")


def run(found: argparse.Namespace) -> int:
    """Measure, print and write the profile, and return the exit code. Raises ValueError for bad input."""
    if found.micro_batch < 1 or found.repeat < 1 or found.bandwidth <= 0 or found.latency < 0:
        raise ValueError(
            "--micro-batch and --repeat have to be at least 1, --bandwidth above 0, --latency not negative"
        )
    if found.out is not None and not found.out.resolve().parent.is_dir():
        raise ValueError(f"--out {found.out}: there is no folder {found.out.resolve().parent}")
    from recycle_plugin.core.vocabulary import profile
    from recycle_plugin.lab.commands import measure_gpt
    from recycle_plugin.lab.planner import analytic

    taken = analytic.preset(found.preset, found.micro_batch) if found.preset else measure_gpt.measure(found)
    print(report(taken))
    if found.out is not None:
        profile.write(taken, found.out)
        print(f"written to {found.out}")
    return 0


def report(taken: Profile) -> str:
    """Return a table of the profile with a row for each part, in milliseconds and megabytes."""
    lines = [
        taken.title,
        f"{'':>9} {'F':>9} {'I':>9} {'W':>9} {'I + W':>9} {'fused B':>9} {'step':>9} {'held F-I':>9} {'held I-W':>9}  "
        "ms, MB",
    ]
    for name in ("first", "layer", "last"):
        part: LayerProfile = getattr(taken, name)
        times = (
            part.forward_us,
            part.input_us,
            part.weight_us,
            part.input_us + part.weight_us,
            part.backward_us,
            part.step_us,
        )
        sizes = (part.activation_bytes, part.pending_bytes)
        lines.append(
            f"{name:>9} "
            + " ".join(f"{us / 1e3:9.3f}" for us in times)
            + " "
            + " ".join(f"{size / 1e6:9.2f}" for size in sizes)
        )
    lines.append(
        f"boundary tensor {taken.boundary_bytes / 1e6:.2f} MB; between hosts {taken.across.bytes_per_us / 1e3:g} GB/s, "
        f"{taken.across.latency_us:g} us"
    )
    lines.append(f"memory {taken.device_bytes / (1 << 30):.1f} GiB")
    return "\n".join([*lines, *taken.assumptions])
