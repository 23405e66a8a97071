"""Which private names of DeepSpeed's and megatron-core's the adapters use: in one module each, so that an update is
checked in one place.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[2] / "recycle_plugin" / "adapters"
PRIVATE = re.compile(r"_[a-z]\w*|_[A-Z]\w*")
USED = {
    "deepspeed": {
        "checkpoint.py": {"_get_all_ckpt_names"},
        "engine.py": {
            "_INSTRUCTION_MAP",
            "_broadcast_model",
            "_build_data_iter",
            "_cast_inputs_half",
            "_config",
            "_configure_bf16_optimizer",
            "_configure_fp16_optimizer",
            "_do_optimizer_sanity_check",
            "_exec_optimizer_step",
            "_layer_specs",
            "_next_batch",
        },
        "model.py": {"_build"},
    },
    "megatron": {"layers.py": {"_forward_impl"}},
}
FOREIGN = {"deepspeed": ("deepspeed.runtime", "deepspeed.monitor", "deepspeed.pipe"), "megatron": ("megatron.core",)}


def theirs(package: str) -> set[str]:
    """Private methods and attributes of the package's classes."""
    found: set[str] = set()
    for place in importlib.util.find_spec(package).submodule_search_locations:
        for path in Path(place).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found |= set_on_self(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                    found |= {
                        target.id
                        for one in node.body
                        if isinstance(one, ast.Assign)
                        for target in one.targets
                        if isinstance(target, ast.Name)
                    }
    return {name for name in found if PRIVATE.fullmatch(name)}


def ours(tree: ast.Module) -> set[str]:
    """Private names that the module gives its own things: attributes that it sets on itself, and methods of classes
    without a base.
    """
    made = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.bases]
    methods = {one.name for node in own for one in node.body if isinstance(one, ast.FunctionDef)}
    called_above = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    }
    return (made | methods) - called_above


def used(path: Path, foreign: set[str]) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    return (names & foreign) - ours(tree)


@pytest.mark.parametrize("adapter", USED)
def test_private_names_are_used_where_it_is_said_here(adapter: str) -> None:
    foreign = set().union(*map(theirs, FOREIGN[adapter]))
    assert len(foreign) > 100
    found = {path.name: names for path in sorted((ADAPTERS / adapter).glob("*.py")) if (names := used(path, foreign))}
    assert found == USED[adapter]


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
        "_INSTRUCTION_MAP",
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
            RecycleError, match=rf"Mine\.{name} has the name of a part of the plugin's engine.*give it another name"
        ):
            engine_class(type("Mine", (PipelineEngine,), {name: lambda self: None}), job=None)
