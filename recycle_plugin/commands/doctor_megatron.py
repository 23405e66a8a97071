"""``recycle doctor --megatron FLAGS…``: which of a Megatron-LM command line's flags are refused.

Megatron-LM need not be installed here: only the flags that the plugin refuses are known, and what Megatron takes where
a command line says nothing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from recycle_plugin.adapters.megatron_lm.refusals import ROWS, refusals

DEFAULTS = {"gradient_accumulation_fusion": True, "ckpt_format": "torch_dist"}
OTHERS = {"--save": "save", "--load": "load", "--ckpt-format": "ckpt_format"}
SWITCHES = {
    "--no-gradient-accumulation-fusion": ("gradient_accumulation_fusion", False),
    "--use-distributed-optimizer": ("use_distributed_optimizer", True),
}


def megatron(flags: Sequence[str]) -> int:
    """Print a line for each flag that is refused, or that none is; returns 1 where one is."""
    lines = [f"! {line}" for line in refusals(parsed(flags))]
    print("\n".join(lines or ["Nothing has to change: the plugin takes these flags."]))
    return int(bool(lines))


def parsed(flags: Sequence[str]) -> Namespace:
    """What Megatron's parser would make of those of ``flags`` that matter here."""
    found: dict[str, object] = dict(DEFAULTS)
    names = {row.flag: row.name for row in ROWS} | OTHERS
    for flag, value in _words(flags):
        if flag in names:
            found[names[flag]] = value
        elif flag in SWITCHES:
            name, found_value = SWITCHES[flag]
            found[name] = found_value
    return Namespace(**found)


def _words(flags: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Each flag with its value: a number where it is one, True where there is none."""
    for place, word in enumerate(flags):
        if word.startswith("--"):
            flag, given, value = word.partition("=")
            following = flags[place + 1 : place + 2]
            if not given and following and not following[0].startswith("--"):
                given, value = "=", following[0]
            yield flag, (int(value) if value.isdigit() else value) if given else True
