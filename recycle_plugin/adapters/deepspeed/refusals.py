"""What a DeepSpeed config asks for and does not get.  Read from the config alone: imports neither torch nor DeepSpeed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Iterator

from recycle_plugin.runtime.errors import RecycleError
from recycle_plugin.wording import shown


def refusals(config: dict[str, Any]) -> Iterator[str]:
    """A line for each, which says what to change.  ``config``: the whole DeepSpeed config.

    Raises RecycleError for sections that are no JSON objects.
    """
    yield from _precision(config)
    yield from _zero(config)
    yield from _optimizer(_section(config, "optimizer"))
    yield from _checkpoint(_section(config, "checkpoint"))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise RecycleError(f"{name} is {shown(found)}; write an object, or leave it out")
    return found


def _precision(config: dict[str, Any]) -> Iterator[str]:
    for name in ("bf16", "bfloat16", "fp16", "torch_autocast", "amp"):
        if _section(config, name).get("enabled"):
            yield f"{name}.enabled: only fp32 is supported yet (bf16 comes next); remove the {name} section or set enabled to false"


def _zero(config: dict[str, Any]) -> Iterator[str]:
    stage = _section(config, "zero_optimization").get("stage", 0)
    if stage == 1:
        yield (
            "zero_optimization.stage 1 shards the optimizer state, so that a lost worker's shard has no copy; "
            "set stage to 0 (protected shards come later)"
        )
    elif stage:
        yield f"zero_optimization.stage {stage} does not work with pipelines in DeepSpeed itself; set stage to 0"


def _optimizer(section: dict[str, Any]) -> Iterator[str]:
    """DeepSpeed's own Adam is compiled at first use: say so before the compiler does."""
    name = str(section.get("type", "")).lower()
    if name not in ("adam", "adamw") or _section(section, "params").get("torch_adam"):
        return
    advice = 'set optimizer.params.torch_adam to true, which needs no compiler'
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        yield f"optimizer {section['type']} is compiled by DeepSpeed at first use, and there is no C++ compiler; {advice}"
        return
    stale = _stale_lock()
    if stale is not None:
        yield f"{stale} is the lock of a DeepSpeed extension whose build died: DeepSpeed would wait for it for ever; delete it, or {advice}"


def _checkpoint(section: dict[str, Any]) -> Iterator[str]:
    """DeepSpeed's other ways to save: what they write can't be waited for, is not seen by all, or is no state of this optimizer."""
    reasons = {
        "load_universal": "needs the files of a ZeRO optimizer, and only ZeRO stage 0 is supported yet",
        "use_node_local_storage": "keeps each host's files where the others can't read them, and a lost host takes them along",
        "writer": "writes files of which nobody can say when they are whole",
    }
    for name, reason in reasons.items():
        if section.get(name):
            yield f"checkpoint.{name} {reason}; leave it out"


def _stale_lock() -> Path | None:
    """A build lock in the extensions' cache that no live process holds."""
    default = Path.home() / ".cache" / "torch_extensions"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    return next((lock for lock in sorted(folder.glob("**/lock")) if not _held(lock)), None)


def _held(lock: Path) -> bool:
    """Whether some process of this user has the lock file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.resolve() == lock.resolve():
                return True
        except OSError:
            continue
    return False
