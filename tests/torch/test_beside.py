"""What of a stage's state is in no file that DeepSpeed writes is found, saved beside it, and read again."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("deepspeed")

from recycle_plugin.adapters.deepspeed.checkpoint import (
    EngineFiles,
    Inventory,
    beside,
    file_beside,
    take_beside,
)
from recycle_plugin.adapters.deepspeed.ports import loss_scaler
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.state.stage_state import StatePart
from recycle_plugin.runtime.worker.checkpoint_files import WrittenShare, copied
from tests.jobs.odd_optimizers import Lookahead, adamw
from tests.support.optimizers import same, stage_state
from tests.support.whole_stage import Worker, without


class Files:
    copies = False

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def save(self, path: Path, contents: object) -> None:
        self.paths.append(path)


def test_what_is_written_later_is_what_was_to_be_saved_whatever_becomes_of_it_meanwhile(tmp_path):
    weight, moment = torch.nn.Parameter(torch.arange(3.0)), torch.arange(4.0).reshape(2, 2).t()
    path, points = tmp_path / "saved" / "file.pt", []
    share = WrittenShare(SimpleNamespace(dump=torch.save), 0, 1, points.append, copies=True)
    share.save(path, OrderedDict(module={"weight": weight}, state=[{"moments": (moment, 3)}, None], name="x"))
    with torch.no_grad():
        weight.fill_(7), moment.fill_(7)
    assert not path.exists() and not points
    share.write()
    found = torch.load(path, weights_only=False)
    assert points == ["checkpoint.file"] and type(found) is OrderedDict and list(found) == ["module", "state", "name"]
    assert found["name"] == "x"
    assert found["module"]["weight"].tolist() == [0, 1, 2] and not found["module"]["weight"].requires_grad
    assert found["state"][0]["moments"][0].tolist() == [[0, 2], [1, 3]] and found["state"][0]["moments"][1:] == (3,)
    assert found["state"][1] is None


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_a_copy_has_what_the_original_has_besides_its_values():
    found, weights = defaultdict(list, a=[torch.ones(2)]), torch.nn.BatchNorm1d(2).state_dict()
    state, module, pair = copied([found, weights, Pair(torch.ones(2), 3)], Path("x"))
    found["a"][0].fill_(7)
    assert type(state) is defaultdict and state["b"] == [] and state["a"][0].tolist() == [1, 1] and "b" not in found
    assert type(module) is OrderedDict and module._metadata == weights._metadata and list(module) == list(weights)
    assert type(pair) is Pair and pair.second == 3


def left(worker: Worker, layers: dict[int, torch.nn.Module], optimizer: dict | None) -> dict:
    """After files of ``layers`` and one with the state ``optimizer``, as stock writes them."""
    files = Files()
    inventory = Inventory(None, files, str, list(worker.state.optimizer.parameters()), {"weights/0.bias"})
    for number, layer in layers.items():
        inventory.save(layer.state_dict(), f"saved/tag/layer_{number:02d}-model_states.pt")
    inventory.save({"module": None, "optimizer": optimizer}, "saved/tag/mp_rank_00_model_states.pt")
    assert len(files.paths) == len(layers) + 1
    return inventory.left(worker.state)


def test_all_that_stock_saves_leaves_the_loss_scale():
    worker = Worker().steps(0)
    found = left(worker, dict(enumerate(worker.module.values())), worker.engine.basic_optimizer.state_dict())
    assert found == {"step": worker.state.step, "small": {"loss_scale": worker.scale.state()}, "tensors": {}}


def test_where_nothing_is_left_there_is_no_file():
    worker = Worker().steps(0)
    worker.scale._scaler = None
    assert left(worker, dict(enumerate(worker.module.values())), worker.engine.basic_optimizer.state_dict()) == {}


def test_a_part_that_nobody_knows_is_saved():
    """... and one that was forgotten in the list is not, which is what the list's own tests find."""
    worker = Worker().steps(0)
    worker.state.parts["more"] = StatePart("more", get=lambda: 3, set=lambda value: None)
    without(worker.state, "loss_scale")
    assert left(worker, dict(enumerate(worker.module.values())), worker.engine.basic_optimizer.state_dict()) == {
        "step": worker.state.step,
        "small": {"more": 3},
        "tensors": {},
    }


@pytest.mark.parametrize("with_optimizer", (True, False))
def test_what_is_left_is_read_again(with_optimizer, tmp_path):
    """Of a layer without a file its weights; of an optimizer whose ``state_dict`` leaves something out, that."""
    source, target = Worker().steps(0, 1, 2), Worker(seed=1)
    optimizer = copy.deepcopy(source.engine.basic_optimizer.state_dict())
    del optimizer["state"][0]["exp_avg"]
    found = left(source, {0: source.module["0"]}, optimizer)
    first = next(iter(source.state.optimizer.parameters()))
    assert set(found["tensors"]) == {"weights/2.bias", f"optimizer/{first}/exp_avg"}
    torch.save(found, tmp_path / "file")
    if with_optimizer:  # as stock code has done by then
        target.engine.basic_optimizer.load_state_dict(copy.deepcopy(optimizer))
    before = target.found()
    take_beside(target.state, torch.load(tmp_path / "file", weights_only=False), with_optimizer)
    after = target.found()
    assert same(after["weights"]["2.bias"], source.found()["weights"]["2.bias"])
    assert same(after["weights"]["0.weight"], before["weights"]["0.weight"])
    assert after["loss_scale"] == (source if with_optimizer else Worker(seed=1)).found()["loss_scale"]
    assert same(after["optimizer"], source.found()["optimizer"]) == with_optimizer


def test_what_an_optimizer_has_as_attributes_is_read_again(tmp_path):
    parameters = [[torch.nn.Parameter(torch.ones(2))] for _ in range(2)]
    optimizers = [Lookahead(adamw(each), 2) for each in parameters]
    source, target = (stage_state(*each) for each in zip(parameters, optimizers, strict=True))
    for _ in range(3):
        parameters[0][0].grad = torch.ones(2)
        optimizers[0].step()
    inventory = Inventory(None, Files(), str, ["0"], {"weights/0"})
    inventory.save({"module": None, "optimizer": optimizers[0].state_dict()}, "saved/tag/mp_rank_00_model_states.pt")
    found = inventory.left(source)
    assert found["small"].keys() == {"attributes"} and set(found["tensors"]) == {"attributes/slow/0/0"}
    torch.save(found, tmp_path / "file")
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    take_beside(target, torch.load(tmp_path / "file", weights_only=False), True)
    assert optimizers[1].count == 3 and same(optimizers[1].slow, optimizers[0].slow)
    assert same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_of_another_model_it_is_refused():
    with pytest.raises(
        RecycleError,
        match="weights/9.bias is no tensor of this worker's state: the other worker, or the checkpoint, is of another "
        "model",
    ):
        take_beside(Worker().state, {"small": {}, "tensors": {"weights/9.bias": torch.ones(3)}}, True)


def test_the_file_of_a_stage_is_of_the_checkpoints_step_and_missing_only_where_all_are(tmp_path):
    """Or stages would go on with different loss scales, or with weights of another time."""
    assert beside(tmp_path, 1, 6, torch.load) == {"small": {}, "tensors": {}}
    torch.save({"step": 6, "small": {}, "tensors": {"weights/9.bias": torch.ones(3)}}, file_beside(tmp_path, 0))
    assert beside(tmp_path, 1, 6, torch.load) == {"small": {}, "tensors": {}}, (
        "what one stage has in tensors another need not have"
    )
    torch.save({"step": 6, "small": {"loss_scale": {"cur_scale": 2.0}}, "tensors": {}}, file_beside(tmp_path, 0))
    assert beside(tmp_path, 0, 6, torch.load)["small"] == {"loss_scale": {"cur_scale": 2.0}}
    with pytest.raises(
        RecycleError,
        match=r"recycle_stage_01.pt is missing, and recycle_stage_00.pt is there; copy the checkpoint whole",
    ):
        beside(tmp_path, 1, 6, torch.load)
    with pytest.raises(
        RecycleError, match=r"recycle_stage_00.pt is of step 6, and the checkpoint is of step 9; load another one"
    ):
        beside(tmp_path, 0, 9, torch.load)
    assert beside(tmp_path, 1, None, torch.load)["tensors"] == {} and beside(tmp_path, 0, None, torch.load)["step"] == 6


@pytest.mark.parametrize("ours, theirs", ((0.0, 64.0), (64.0, 0.0)))
def test_a_loss_scale_of_another_kind_is_refused(ours, theirs, tmp_path):
    """A static one would be taken for the dynamic one's state, and never change again."""
    section = SimpleNamespace(
        initial_scale_power=8, loss_scale_window=4, hysteresis=1, consecutive_hysteresis=False, min_loss_scale=1
    )
    mine, saved = (loss_scaler(SimpleNamespace(loss_scale=each, **vars(section))) for each in (ours, theirs))
    torch.save({"step": 6, "small": {"loss_scale": vars(saved)}, "tensors": {}}, file_beside(tmp_path, 0))
    stock = SimpleNamespace(load=lambda file, map_location: torch.load(file, map_location, weights_only=False))
    engine = SimpleNamespace(checkpoint_engine=stock, stage_id=0, global_steps=6)
    files, before = EngineFiles(engine, stock, None, None, None, mine), dict(vars(mine))
    with pytest.raises(
        RecycleError, match="the checkpoint's loss scale is (static|dynamic), and fp16.loss_scale makes"
    ):
        files.load_beside(None, tmp_path, True)
    assert vars(mine) == before


class Foreign:
    """Of a class that who reads it does not have."""

    def __reduce__(self) -> tuple:
        return getattr, (SimpleNamespace, "of_another_version")


@pytest.mark.parametrize("damage", ("cut", "foreign", "other", "empty"))
def test_a_damaged_file_of_the_optimizers_state_is_refused_in_one_line(damage, tmp_path):
    """Stock reads none of it, so stock's own checks do not see it."""
    path = tmp_path / "global_step6" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.parent.mkdir()
    torch.save({"foreign": Foreign(), "other": [1]}.get(damage, {"exp_avg": torch.ones(100)}), path)
    if damage in ("cut", "empty"):
        path.write_bytes(path.read_bytes()[: 900 * (damage == "cut")])
    parts = SimpleNamespace(read=lambda folder, read: read(str(path))["optimizer_state_dict"])
    stock = SimpleNamespace(load=lambda file, map_location: torch.load(file, map_location, weights_only=False))
    engine = SimpleNamespace(checkpoint_engine=stock, device="cpu")
    session = SimpleNamespace(heartbeats=SimpleNamespace(at=lambda *at: nullcontext()))
    ties = SimpleNamespace(load=lambda folder, read: None)
    files = EngineFiles(engine, stock, session, ties, parts, None)
    with pytest.raises(RecycleError, match="global_step6 is damaged, incomplete, or not of such a job; load another"):
        files.load_rest(None, path.parent, True)
