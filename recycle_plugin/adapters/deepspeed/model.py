"""What a PipelineModule's forwards depend on besides their inputs, made the same whoever runs them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing

from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.stage.randomness import keyed


def reentrant(module: PipelineModule) -> bool:
    """Whether ``module`` checkpoints activations in a way that leaves out layers whose inputs require no gradient."""
    return (
        module.activation_checkpoint_interval > 0
        and module.activation_checkpoint_func is not checkpointing.non_reentrant_checkpoint
    )


def keyed_forward(module: PipelineModule, seed: int, place: int, device: Device) -> AbstractContextManager:
    """A context in which a forward on ``device`` draws by ``seed``.

    ``place``: the position of the micro-batch among its replica's.  ``seed_layers`` seeds each layer by how many
    forwards its worker has run: by ``place``, which is that number without a failure, and the same whoever runs it.
    """
    module.micro_offset = place
    return keyed(seed, device)
