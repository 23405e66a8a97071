"""Patches apply where they fit, and refuse where they do not fit."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import replace
from importlib.util import module_from_spec

import pytest
import torch

from recycle_plugin.patches import Patch, PatchMismatch, source_sha256


class Holder:
    """Stands for a foreign class."""

    def answer(self) -> int:
        return 41


def better(self) -> int:
    return 42


@pytest.fixture
def patch(monkeypatch) -> Patch:
    module = types.ModuleType("foreign_package")
    module.Holder = Holder
    monkeypatch.setitem(sys.modules, "foreign_package", module)
    original = vars(Holder)["answer"]
    monkeypatch.setattr(Holder, "answer", original)  # put back after the test
    return Patch("foreign_package:Holder.answer", "torch", ">=2", source_sha256(original), better)


def test_apply_is_idempotent(patch):
    assert Holder().answer() == 41
    patch.apply()
    patch.apply()
    assert Holder().answer() == 42


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            {"source_sha256": "0" * 64},
            "foreign_package:Holder.answer: expected source with sha256 0000.*, found [0-9a-f]{64}",
        ),
        ({"versions": "<1"}, "foreign_package:Holder.answer: expected torch <1, found 2"),
        ({"package": "no-such-thing"}, "expected no-such-thing >=2, found no such package"),
        ({"target": "foreign_package:Holder.question"}, "Holder.question: expected in torch >=2, found nothing"),
        ({"target": "no_such_module:f"}, "no_such_module:f: expected in torch >=2, found nothing"),
    ),
)
def test_a_mismatch_is_refused_and_changes_nothing(patch, change, message):
    original = vars(Holder)["answer"]
    wrong = replace(patch, **change)
    with pytest.raises(PatchMismatch, match=message):
        wrong.apply()
    assert vars(Holder)["answer"] is original


def test_a_second_patch_of_the_same_target_is_refused(patch):
    other = replace(patch, replacement=lambda self: 43)
    patch.apply()
    with pytest.raises(PatchMismatch, match="expected source"):
        other.apply()


def test_a_module_is_found_behind_an_attribute_of_the_same_name():
    """deepspeed.comm.torch is a module; the attribute ``torch`` of deepspeed.comm is torch itself."""
    pytest.importorskip("deepspeed")
    patch = Patch("deepspeed.comm.torch:build_shm_op", "deepspeed", ">=0", "0" * 64, lambda: None)
    with pytest.raises(PatchMismatch, match="expected source"):
        patch.apply()


@pytest.fixture
def utils(monkeypatch) -> types.ModuleType:
    """megatron-core's module as it is installed, whatever this process has patched."""
    spec = pytest.importorskip("megatron.core.utils").__spec__
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setitem(sys.modules, "megatron.core.utils", fresh)
    return fresh


def test_megatron_on_the_cpu(monkeypatch, utils):
    from recycle_plugin.patches import megatron_cpu

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    megatron_cpu.apply()
    buffer = utils.GlobalMemoryBuffer()
    small = buffer.get_tensor((2, 3), torch.float32, "mpu")
    large = buffer.get_tensor((4, 3), torch.float32, "mpu")
    assert small.shape == (2, 3) and large.shape == (4, 3) and large.device.type == "cpu"
    assert buffer.get_tensor((1, 2), torch.float32, "mpu").data_ptr() == large.data_ptr()


def test_nothing_is_patched_with_cuda(monkeypatch, utils):
    from recycle_plugin.patches import megatron_cpu

    stock = utils.GlobalMemoryBuffer.get_tensor
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    megatron_cpu.apply()
    assert utils.GlobalMemoryBuffer.get_tensor is stock
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    megatron_cpu.apply()
    replaced = utils.GlobalMemoryBuffer.get_tensor
    assert replaced is not stock, "the machine has CUDA, and the job was told to use the CPU"


def test_deepspeed_builds_no_extension_for_its_collectives(monkeypatch):
    pytest.importorskip("deepspeed")
    import deepspeed

    from recycle_plugin.patches import deepspeed_cpu

    comm = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", dict(deepspeed.ops.__compatible_ops__))
    deepspeed_cpu.apply()
    assert comm.build_shm_op() is None


def test_zero_3s_checks_are_replaced_as_they_are_installed(monkeypatch):
    from deepspeed.runtime.zero import utils

    from recycle_plugin.patches import deepspeed_zero3

    names = "assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"
    before = [getattr(utils, name) for name in names]
    for name, stock in zip(names, before, strict=True):
        monkeypatch.setattr(utils, name, stock)  # put back after the test
    deepspeed_zero3.apply()
    assert not {getattr(utils, name) for name in names} & {*before}
