"""Patches apply where they fit, can be taken back, and refuse where they do not fit."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

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
    return Patch("foreign_package:Holder.answer", "torch", ">=2", source_sha256(Holder.answer), better)


def test_apply_is_idempotent_and_revert_restores_exactly(patch):
    original = vars(Holder)["answer"]
    patch.revert()
    patch.apply()
    patch.apply()
    assert Holder().answer() == 42 and patch.applied
    patch.revert()
    patch.revert()
    assert vars(Holder)["answer"] is original and not patch.applied
    patch.apply()
    patch.revert()
    assert vars(Holder)["answer"] is original


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
    assert vars(Holder)["answer"] is original and not wrong.applied


def test_a_second_patch_of_the_same_target_is_refused(patch):
    other = replace(patch, replacement=lambda self: 43)
    patch.apply()
    try:
        with pytest.raises(PatchMismatch, match="expected source"):
            other.apply()
    finally:
        patch.revert()


def test_revert_under_a_later_replacement_is_refused(patch, monkeypatch):
    patch.apply()
    monkeypatch.setattr(Holder, "answer", lambda self: 44)
    with pytest.raises(PatchMismatch, match="replaced again after this patch"):
        patch.revert()
    monkeypatch.undo()
    vars(patch)["_original"].clear()


def test_a_module_is_found_behind_an_attribute_of_the_same_name():
    """deepspeed.comm.torch is a module; the attribute ``torch`` of deepspeed.comm is torch itself."""
    pytest.importorskip("deepspeed")
    patch = Patch("deepspeed.comm.torch:build_shm_op", "deepspeed", ">=0", "0" * 64, lambda: None)
    with pytest.raises(PatchMismatch, match="expected source"):
        patch.apply()


def test_megatron_on_the_cpu_and_back(monkeypatch):
    utils = pytest.importorskip("megatron.core.utils")
    from recycle_plugin.patches import megatron_cpu

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    was_applied = megatron_cpu.MEMORY_BUFFER.applied
    megatron_cpu.revert()
    stock = utils.GlobalMemoryBuffer.get_tensor
    try:
        megatron_cpu.apply()
        buffer = utils.GlobalMemoryBuffer()
        small = buffer.get_tensor((2, 3), torch.float32, "mpu")
        large = buffer.get_tensor((4, 3), torch.float32, "mpu")
        assert small.shape == (2, 3) and large.shape == (4, 3) and large.device.type == "cpu"
        assert buffer.get_tensor((1, 2), torch.float32, "mpu").data_ptr() == large.data_ptr()
        megatron_cpu.revert()
        assert utils.GlobalMemoryBuffer.get_tensor is stock
    finally:
        if was_applied:
            megatron_cpu.apply()


def test_nothing_is_patched_with_cuda(monkeypatch):
    pytest.importorskip("megatron.core.utils")
    from recycle_plugin.patches import megatron_cpu

    was_applied = megatron_cpu.MEMORY_BUFFER.applied
    megatron_cpu.revert()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    megatron_cpu.apply()
    assert not megatron_cpu.MEMORY_BUFFER.applied
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    megatron_cpu.apply()
    assert megatron_cpu.MEMORY_BUFFER.applied, "the machine has CUDA, and the job was told to use the CPU"
    megatron_cpu.revert()
    monkeypatch.undo()
    if was_applied:
        megatron_cpu.apply()


def test_deepspeed_builds_no_extension_for_its_collectives():
    pytest.importorskip("deepspeed")
    import importlib

    import deepspeed

    from recycle_plugin.patches import deepspeed_cpu

    comm = importlib.import_module("deepspeed.comm.torch")
    before = dict(deepspeed.ops.__compatible_ops__)
    deepspeed_cpu.apply()
    try:
        assert comm.build_shm_op() is None
    finally:
        deepspeed_cpu.revert()
    assert deepspeed.ops.__compatible_ops__ == before


def test_zero_3s_checks_are_replaced_as_they_are_installed_and_put_back():
    from deepspeed.runtime.zero import utils

    from recycle_plugin.patches import deepspeed_zero3

    before = utils.assert_lst_len_same_as_other_ranks, utils.get_lst_from_rank0
    deepspeed_zero3.apply()
    assert not {utils.assert_lst_len_same_as_other_ranks, utils.get_lst_from_rank0} & {*before}
    deepspeed_zero3.revert()
    assert (utils.assert_lst_len_same_as_other_ranks, utils.get_lst_from_rank0) == before
