"""The job that a Megatron-LM command line describes, for ``--megatron FLAGS…`` of ``recycle doctor`` and ``recycle
plan``.

Megatron-LM need not be installed here: only the flags that the plugin refuses, or that a plan needs, are known, with
Megatron's defaults.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from recycle_plugin.adapters.megatron_lm.refusals import ROWS, refusals

DEFAULTS = {"gradient_accumulation_fusion": True, "ckpt_format": "torch_dist"}
STAGES, BATCH, SAMPLES, WORKERS = (
    "--pipeline-model-parallel-size",
    "--global-batch-size",
    "--micro-batch-size",
    "--workers",  # the launcher's
)
OTHERS = {"--save": "save", "--load": "load", "--ckpt-format": "ckpt_format"}
COUNTS = {STAGES: "stages", BATCH: "batch", SAMPLES: "samples", WORKERS: "workers"}
SWITCHES = {
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "--use-distributed-optimizer": ("use_distributed_optimizer", True),
    "--untie-embeddings-and-output-weights": ("untied", True),
}


def megatron(flags: Sequence[str]) -> int:
    """Print a line for each refused flag, or that there is none, and return 1 if one is refused."""
    lines = [f"! {line}" for line in refusals(parsed(flags))]
    print("\n".join(lines or ["Nothing has to change: the plugin takes these flags."]))
    return int(bool(lines))


def shape(flags: Sequence[str], replicas: int | None) -> tuple[int, int, int, str]:
    """Return stages, replicas, micro-batches of a replica, and tied stages (as for ``--tied``) of the job of ``flags``.

    ``replicas`` None: they follow from the number of workers in ``flags``. Raises ValueError for flags that the plugin
    refuses, and for numbers that fit no job.
    """
    args = parsed(flags)
    if refused := next(refusals(args), None):
        raise ValueError(refused)
    stages, samples = _count(args, STAGES, 1), _count(args, SAMPLES)
    if replicas is None:
        workers = _count(args, WORKERS, hint="or write --dp D before --megatron")
        replicas = _divided(workers, stages, f"{WORKERS} {workers}", f"{STAGES} {stages}")
    if replicas < 1:
        raise ValueError(f"--dp {replicas}: write at least 1")
    batch = _count(args, BATCH, samples * replicas)
    of = f"{SAMPLES} {samples} times {replicas} replicas"
    micro_batches = _divided(batch, samples * replicas, f"{BATCH} {batch}", of)
    return stages, replicas, micro_batches, f"0+{stages - 1}" if stages > 1 and not hasattr(args, "untied") else ""


def _count(args: Namespace, flag: str, default: int | None = None, hint: str = "") -> int:
    found = getattr(args, COUNTS[flag], default)
    if found is None:
        raise ValueError(f"{flag} is missing among Megatron-LM's flags: write {flag} N{hint and f', {hint}'}")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"{flag}{'' if found is True else f' {found}'}: write a whole number of at least 1 behind it")
    return found


def _divided(number: int, by: int, what: str, of: str) -> int:
    if number % by:
        raise ValueError(f"{what} is no multiple of {of}: write a multiple of {by}")
    return number // by


def parsed(flags: Sequence[str]) -> Namespace:
    """Return the values that Megatron's parser would give the flags that matter here."""
    found: dict[str, object] = dict(DEFAULTS)
    names = {row.flag: row.name for row in ROWS} | OTHERS | COUNTS
    for flag, value in _words(flags):
        if flag in names:
            found[names[flag]] = value
        elif flag in SWITCHES:
            name, found_value = SWITCHES[flag]
            found[name] = found_value
    return Namespace(**found)


def _words(flags: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield each flag with its value: an int for digits, True if there is none."""
    for place, word in enumerate(flags):
        if word.startswith("--"):
            flag, given, value = word.partition("=")
            following = flags[place + 1 : place + 2]
            if not given and following and not following[0].startswith("--"):
                given, value = "=", following[0]
            yield flag, (int(value) if value.isdigit() else value) if given else True
