"""Hugging Face's Trainer over the live ranks. An evaluation that a loss interrupts is repeated, a checkpoint that a
lost process was writing is written by the next one, and replicas rejoin (returns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import trainer, trainer_callback, trainer_pt_utils

from recycle_plugin.adapters.hugging_face.operations import replace, wrap_method
from recycle_plugin.adapters.hugging_face.returns import Returns
from recycle_plugin.adapters.hugging_face.team import Team
from recycle_plugin.errors import RecycleError

REFUSED = {
    "batch_eval_metrics": "keeps parts of an evaluation that a loss has interrupted",
    "torch_compile": "is not tried yet",
    "auto_find_batch_size": "builds a second engine",
}


def install(team: Team, returns: Returns | None) -> None:
    """Have Trainers of this process follow ``team``; ``returns``: None if replicas don't rejoin."""
    made = Seams(team, returns)
    replace(trainer_pt_utils, "distributed_concat", made.concat)
    replace(trainer_pt_utils, "distributed_broadcast_scalars", made.scalars)
    for name in ("evaluation_loop", "_save_checkpoint", "save_model"):
        wrap_method(trainer.Trainer, name, getattr(made, name.lstrip("_")))
    wrap_method(trainer_callback.CallbackHandler, "call_event", made.call_event)
    for name in () if returns is None else ("_run_epoch", "get_batch_samples", "_load_rng_state", "_finalize_training"):
        wrap_method(trainer.Trainer, name, getattr(returns, name.lstrip("_")))
    if returns is not None:
        wrap_method(trainer.Trainer, "_evaluate", returns.evaluate)


def check(args: Any) -> None:
    """Raise RecycleError if a Trainer's arguments ask for something unsupported, before its first step."""
    for name, why in REFUSED.items():
        if getattr(args, name, False):
            raise RecycleError(f"TrainingArguments({name}=True) with recycle.replicas {why}; leave it out")
    if args.accelerator_config.split_batches:
        raise RecycleError(
            "accelerator_config split_batches with recycle.replicas: after a loss the ranks that are left may not be "
            "able to share a batch; leave it out"
        )


class MemberLost(Exception):
    """A rank with samples of an evaluation was lost."""


def _give_up(left: tuple[int, ...]) -> None:
    raise MemberLost


class Seams:
    """Replacements for functions and methods of transformers; those that get ``stock`` call it."""

    def __init__(self, team: Team, returns: Returns | None) -> None:
        self._team, self._returns = team, returns

    def concat(self, tensor: Any, num_total_examples: int | None = None) -> Any:
        """Gather tensors, alone or nested: the rows of the live ranks, concatenated."""
        if isinstance(tensor, (tuple, list)):
            return type(tensor)(self.concat(each, num_total_examples) for each in tensor)
        if isinstance(tensor, Mapping):
            made: Any = type(tensor)
            return made({name: self.concat(each, num_total_examples) for name, each in tensor.items()})
        return self._team.joined(tensor)[:num_total_examples]

    def scalars(
        self, scalars: list[int | float], num_total_examples: int | None = None, device: Any = None
    ) -> torch.Tensor:
        """Gather numbers of the live ranks."""
        return self._team.joined(torch.tensor(scalars, device=device))[:num_total_examples]

    def evaluation_loop(
        self, stock: Callable[..., Any], of: Any, dataloader: Any, *arguments: Any, **named: Any
    ) -> Any:
        """Evaluate over all samples. If a rank is lost meanwhile, start again, dealt to the ranks that are left."""
        while True:
            self._team.deal(dataloader)
            try:
                with self._team.told_of_losses(_give_up):
                    return stock(of, dataloader, *arguments, **named)
            except MemberLost:
                dataloader.end()

    def save_checkpoint(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> None:
        """Save; again if the rank that writes for all is lost meanwhile."""
        first = None
        while first != (present := self._team.agree()[0]):
            first = present
            stock(of, *arguments, **named)

    def save_model(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> None:
        """Save the model on the first live rank. Scripts may call it on one rank only."""
        with self._team.as_seen():
            stock(of, *arguments, **named)

    def call_event(
        self, stock: Callable[..., Any], of: Any, event: str, args: Any, state: Any, control: Any, **named: Any
    ) -> Any:
        """Call the callbacks, with the present first process in ``state``."""
        if event == "on_train_begin":
            check(args)
        if self._returns is not None and not self._returns.hears(event, of, state):
            return control
        first, before = self._team.is_first, state.is_world_process_zero
        state.is_world_process_zero, state.is_local_process_zero = first, first or args.local_process_index == 0
        if first and not before:
            self._show_progress(of, event, state)
        heard = stock(of, event, args, state, control, **named)
        if event == "on_train_begin" and self._returns is not None:
            self._returns.began(of, state)
        return heard

    def _show_progress(self, of: Any, event: str, state: Any) -> None:
        """Open the progress bar, which process 0 had opened when training began."""
        if event in ("on_init_end", "on_train_begin"):
            return
        for each in of.callbacks:
            if isinstance(each, trainer_callback.ProgressCallback) and each.training_bar is None:
                each.training_bar = trainer_callback.tqdm(
                    total=state.max_steps, initial=each.current_step, dynamic_ncols=True
                )
