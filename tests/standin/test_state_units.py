"""The state of a stage on an accelerator goes to a newcomer's, which follows it: through host memory, over a line."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from recycle_plugin.core.vocabulary.roster import WorkerId
from recycle_plugin.core.vocabulary.state_stream import Sums, Unit
from recycle_plugin.core.worker.control_view import ControlView
from recycle_plugin.runtime.catch_up.inlet import TcpInlet
from recycle_plugin.runtime.catch_up.listener import StateListener
from recycle_plugin.runtime.catch_up.rate import Rate
from recycle_plugin.runtime.catch_up.wire import Arrival
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.state import units as units_module
from recycle_plugin.runtime.state.stage_state import OptimizerState, StageState, of_parameters, pieces
from tests.support.secret import SECRET
from tests.support.stepped_worker import SteppedWorker, small

D = "standin"
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.01, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
}


def worker(kind: str, seed: int, dtype: torch.dtype) -> SteppedWorker:
    return SteppedWorker(OPTIMIZERS[kind], seed, dtype, model=lambda: small().to(D))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_newcomer_on_an_accelerator_is_filled_and_follows(standin, kind, dtype):
    from tests.support.caught_up import caught_up

    units_module.SLICE_S, units_module.pieces = 0.0, partial(pieces, nbytes=48)
    caught_up(lambda seed: worker(kind, seed, dtype), lambda step: None, 0)


def test_what_is_on_the_device_goes_over_a_line(standin):
    source = worker("adam", 0, torch.float32)
    source.train(1)
    session = SimpleNamespace(
        rank=0,
        own_address="127.0.0.1",
        secret=SECRET,
        note_stranger=print,
        job_id="job",
        note=lambda *said, **more: print(said, more),
        view=ControlView(0),
    )
    changed, found = threading.Condition(), []
    listener = StateListener(session, None, Rate())
    try:
        outlet = listener.expect(WorkerId(2, 1))
        device = device_of(source.summed[0].device)
        inlet = TcpInlet(listener.address, Arrival("job", WorkerId(2, 1)), SECRET, changed, print, device)
        outlet.send(Unit(1, "0.weight", source.units.read("0.weight", rest=True)))
        outlet.send(Sums(1, source.units.sums(1, ["0.weight"])))
        with changed:
            assert changed.wait_for(lambda: found.extend(inlet.items()) or len(found) == 2, 30)
        unit, sums = found
        weight = source.summed[0].detach()
        assert torch.equal(unit.value.tensors["weights/0.weight"], weight.cpu())
        ((told,),) = sums.values.values()
        assert told.device.type == "cpu" and torch.equal(told, source.gradients.applied(1, [source.summed[0]])[0].cpu())
        inlet.close()
    finally:
        listener.close()


@pytest.mark.parametrize("fused", (False, True))
def test_a_state_that_is_read_from_a_file_is_where_torch_has_it(standin, fused):
    """A file's tensors are all on the host; moments go to their parameters, and counts too where kernels count."""
    parameter = torch.nn.Parameter(torch.ones(4, device=D))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    state = StageState(
        lambda: 0, OptimizerState(optimizer, {parameter: "w"}), [of_parameters("weights", {"w": parameter})]
    )
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    small, saved = state.small(), {name: tensor.detach().cpu() for name, tensor in state.tensors().items()}
    where = {kind: value.device for kind, value in optimizer.state[parameter].items()}
    optimizer.state.clear()
    state.put(small)
    state.fill(saved)
    assert {kind: value.device for kind, value in optimizer.state[parameter].items()} == where
    optimizer.step()
    assert where["step"].type == (D if fused else "cpu") and optimizer.state[parameter]["step"].item() == 2
