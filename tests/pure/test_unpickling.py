"""Whoever unpickles bytes runs what they say.  So here is every place where the package does so, or could, with whose
bytes they are; a new one is a decision.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
READS = {
    "recycle_plugin/runtime/state/packing.py": {
        "torch.load": "tensors and plain values of another worker, which looks no class up; and what a script hands "
        "over itself (on_join, what load_checkpoint gave), both over sealed connections",
    },
    "recycle_plugin/runtime/collectives/calls.py": {
        "pickle": "a script's own object collectives, as torch's are",
    },
    "recycle_plugin/adapters/plain/checkpoint.py": {
        "torch.load": "a checkpoint, as torch's are",
    },
    "recycle_plugin/adapters/plain/distributed_files.py": {
        "pickle": "in a checkpoint's folder what others of a replica have planned, as torch's DCP has its .metadata",
        "torch.load": "of such a checkpoint too, plain values and tensors only",
    },
    "recycle_plugin/adapters/deepspeed/checkpoint.py": {
        "pickle": "the name of an error",
        "torch.load": "a checkpoint, as DeepSpeed's are",
    },
    "recycle_plugin/core/messages/typed.py": {
        "exec": "functions made of the names of this package's own fields, before any message is read",
    },
    "recycle_plugin/planner/compiled.py": {
        "njit(cache=True)": "numba's files beside the package's, or in the user's own cache",
    },
    "recycle_plugin/lab/simulator/campaign.py": {
        "multiprocessing": "pipes to processes that this one has forked",
    },
    "recycle_plugin/lab/checks/measured.py": {
        "all_gather_object": "a script of the project's, run in a job of its own",
    },
    "scripts/reproduce/elastic_job.py": {
        "all_gather_object": "the baseline's, as stock",
        "broadcast_object_list": "the baseline's, as stock",
    },
    "scripts/reproduce/restarting_job.py": {"torch.load": "the baseline's own checkpoint"},
}
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing", "jsonpickle"}
LOADERS = {
    ("torch", "load"),
    ("torch", "hub"),
    ("numpy", "load"),
    ("np", "load"),
    ("pandas", "read_pickle"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
}
OBJECTS = {
    "broadcast_object_list",
    "scatter_object_list",
    "all_gather_object",
    "gather_object",
    "send_object_list",
    "recv_object_list",
    "read_pickle",
    "Unpickler",
}
KEYWORDS = {"allow_pickle", "cache"}


def called(call: ast.Call) -> str:
    """Whose bytes a call may unpickle, by a name; empty for none."""
    name = call.func
    if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and (name.value.id, name.attr) in LOADERS:
        return f"{name.value.id}.{name.attr}"
    last = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
    if last in OBJECTS or (last in ("eval", "exec") and isinstance(name, ast.Name)):
        return last
    flags = [each.arg for each in call.keywords if each.arg in KEYWORDS and getattr(each.value, "value", None) is True]
    return f"{last}({flags[0]}=True)" if flags else ""


def found(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and (name := called(node)):
            yield name
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        for name in names:
            if parts := MODULES.intersection(name.split(".")):
                yield parts.pop()
            if name in ("torch.load", "numpy.load"):
                yield name


def test_every_place_that_unpickles_is_listed_with_its_reason() -> None:
    places = {}
    for folder in ("recycle_plugin", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if names := set(found(path)):
                places[str(path.relative_to(ROOT))] = names
    assert places == {path: set(reasons) for path, reasons in READS.items()}


def test_a_new_place_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    for text, name in (
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load(file)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import numpy as np\nnp.load(file, allow_pickle=True)", "np.load"),
        ("read(file, allow_pickle=True)", "read(allow_pickle=True)"),
        ("import torch.distributed as dist\ndist.broadcast_object_list(told, 0)", "broadcast_object_list"),
        ("import torch.multiprocessing", "multiprocessing"),
        ("import cloudpickle", "cloudpickle"),
        ("eval(text)", "eval"),
    ):
        file.write_text(text)
        assert set(found(file)) == {name}
