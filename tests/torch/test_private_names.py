"""Names that the plugin's engine shares with DeepSpeed's, and with engines of users': only those that it means to."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

PRIVATE = re.compile(r"_[a-z]\w*|_[A-Z]\w*")


def test_the_engine_replaces_what_it_means_to_and_nothing_else() -> None:
    """A private name that both happen to use would be an override that nobody wanted."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from recycle_plugin.adapters.deepspeed.engine import RecycleEngine

    parts = [one for one in RecycleEngine.__mro__ if issubclass(one, PipelineEngine) and one is not PipelineEngine]
    assert parts == [RecycleEngine]
    replaced = {
        name for part in parts for name in vars(part) if PRIVATE.fullmatch(name) and hasattr(PipelineEngine, name)
    }
    assert replaced == {
        "_broadcast_model",
        "_build_data_iter",
        "_configure_bf16_optimizer",
        "_configure_fp16_optimizer",
        "_do_optimizer_sanity_check",
    }
    sources = [Path(importlib.util.find_spec(f"deepspeed.runtime.{name}").origin) for name in ("engine", "pipe.engine")]
    stored = {name for path in sources for name in set_on_self(ast.parse(path.read_text()))}
    mine = {name for part in parts for name in set_on_self(ast.parse(inspect.getsource(inspect.getmodule(part))))}
    assert len(stored) > 100 and not {name for name in mine & stored if PRIVATE.fullmatch(name)}


def set_on_self(tree: ast.Module) -> set[str]:
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_what_a_users_engine_adds_takes_no_part_of_ours_away() -> None:
    """Methods that anybody might call so leave the worker's own alone, and what would take its place is refused by
    name.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from recycle_plugin.adapters.deepspeed.engine import RecycleEngine, engine_class
    from recycle_plugin.errors import RecycleError

    everyday = dict.fromkeys(("norm", "share", "compute", "record", "read", "undo", "running"), lambda self: None)
    made = engine_class(type("Mine", (PipelineEngine,), everyday), job=None)
    assert made.norm is everyday["norm"] and made.settle is RecycleEngine.settle
    for name in ("settle", "_trainer"):
        with pytest.raises(
            RecycleError, match=rf"Mine\.{name} has the name of an attribute of the plugin's engine.*another name"
        ):
            engine_class(type("Mine", (PipelineEngine,), {name: lambda self: None}), job=None)
