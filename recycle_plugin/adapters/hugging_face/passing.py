"""A script's own loop with Accelerate in a replica that rejoins: the script repeats the past steps without computing.

Only the script knows where its loop is, so a newcomer's script runs all of it. Until it reaches the others' step, the
engine computes nothing: a forward gives zeros of the right shapes and the step's loss; backward and step only count.
Accelerate's gathers, reductions and synchronisations return the results that the others got (record.py); the live ranks
keep these from the first step on. Batches are drawn as always, so that the loaders end up in the right place.

Meanwhile the others wait in the first step that the newcomer's replica takes part in, for its micro-batches. They begin
each step with a gather that tells which ranks are new, and the last step's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import accelerator
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.utils._pytree import tree_flatten, tree_unflatten

from recycle_plugin.adapters.hugging_face.operations import wrap_method
from recycle_plugin.adapters.hugging_face.randomness import draw_on, drawn
from recycle_plugin.adapters.hugging_face.record import MOST, Record, Replay
from recycle_plugin.adapters.hugging_face.team import Team
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.collectives.callers import calling_line
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.devices.kinds import device_of
from recycle_plugin.runtime.devices.port import Device
from recycle_plugin.runtime.state.touch import FirstTouch

KNOWN = (torch.Tensor, int, float, str, type(None))
NEW, WITHOUT, WITH = range(3)  # ranks before a step: new; without, and with a loss of the last step
PASSED_OVER = ("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict")  # methods of the engine


def install(team: Team, session: Session, engine: Any) -> None:
    """Make this process repeat past steps if it rejoins, and keep the results that other newcomers will need."""
    made = Passing(team, session, engine)
    for name in ("forward", "backward", "step", "set_gradient_accumulation_boundary"):
        wrap_method(type(engine), name, getattr(made, name))
    for name in PASSED_OVER:
        wrap_method(type(engine), name, made.pass_over)
    wrap_method(accelerator.Accelerator, "save_model", made.pass_over)
    for name in ("save_state", "get_state_dict", "clip_grad_norm_", "check_trigger"):
        wrap_method(accelerator.Accelerator, name, getattr(made, name))


class Passing:
    """Replacements for methods of the engine and Accelerate; those that get ``stock`` call it."""

    def __init__(self, team: Team, session: Session, engine: Any) -> None:
        self._team, self._session, self._engine = team, session, engine
        self._device: Device = device_of(engine.device)
        self._record = Record()
        self._loss: float | None = None  # of this rank in the last step
        self._losses: list[torch.Tensor] = []  # of the micro-batches of this step
        self._ends = False  # the step ends with this micro-batch
        self._forms: dict[Any, Any] = {}  # of a forward's result, by the shapes of its inputs
        self._replay: Replay | None = None  # of a newcomer that has not reached the others
        self._touch = FirstTouch(engine.module.parameters, lambda: self._replay is None, self._refuse_read)
        if session.view.newcomer:
            with session.hooks.startup.apart():
                given = self._meet()
            assert given is not None, "this rank is new itself"
            self._record, self._randomness, self._live = *given, team.live
            self._replay, session.hooks.passes = Replay(self._record), True

    # --- the engine's -----------------------------------------------------------------------------------

    def forward(self, stock: Callable[..., Any], of: Any, *inputs: Any, **named: Any) -> Any:
        """Run a forward, or a stand-in while the script is in steps that are over. A step's first one begins it."""
        trains = of.module.training and torch.is_grad_enabled()
        if self._replay is not None and trains:
            self._team.replay = self._replay  # from here on: before its first step, results are its predecessor's
            if self._replay.over:
                self._arrive()
        elif trains and of.between_steps:
            self._open()
        if self._replay is not None:
            with self._touch.lifted(), self._session.hooks.startup.apart(), torch.no_grad():
                return self._stand_in(lambda: stock(of, *inputs, **named), (inputs, named))
        if trains:
            return stock(of, *inputs, **named)
        with self._session.hooks.startup.apart():  # a newcomer does not repeat collectives of before the first step
            return stock(of, *inputs, **named)

    def backward(
        self,
        stock: Callable[..., Any],
        of: Any,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Any:
        """Run a backward; in a step that is over, set ``loss`` to that step's loss instead."""
        share = 1 if scale_wrt_gas else of.gradient_accumulation_steps()
        if self._replay is None:
            self._losses.append(loss.detach() * share)
            return stock(of, loss, retain_graph, scale_wrt_gas)
        loss.detach().fill_(self._replay.losses[self._replay.step] / share)
        return loss

    def set_gradient_accumulation_boundary(self, stock: Callable[..., Any], of: Any, is_boundary: bool) -> None:
        """Record whether the step ends with this micro-batch."""
        self._ends = is_boundary
        if self._replay is None:
            stock(of, is_boundary)

    def step(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> None:
        """Run a step; one that is over is only counted."""
        if self._replay is None:
            stock(of, *arguments, **named)
            if of.between_steps and self._losses:
                self._record.steps += 1
                self._loss, self._losses = torch.stack(self._losses).mean().item(), []
        elif self._ends:
            self._replay.step += 1

    def pass_over(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> Any:
        """Run a method that writes, or nothing in a step that is over: the others have written."""
        return stock(of, *arguments, **named) if self._replay is None else None

    # --- Accelerate's -----------------------------------------------------------------------------------

    def save_state(
        self, stock: Callable[..., Any], of: Any, output_dir: Any = None, *arguments: Any, **named: Any
    ) -> Any:
        """Save, or in a step that is over go on as if saved."""
        if self._replay is None:
            with self._team.unkept():
                return stock(of, output_dir, *arguments, **named)
        if of.project_configuration.automatic_checkpoint_naming:
            output_dir = str(Path(of.project_dir) / "checkpoints" / f"checkpoint_{of.save_iteration}")
        of.project_configuration.iteration += 1
        return output_dir

    def get_state_dict(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> Any:
        """Return the model's state, or {} in a step that is over, since nobody writes it."""
        return stock(of, *arguments, **named) if self._replay is None else {}

    def clip_grad_norm_(self, stock: Callable[..., Any], of: Any, *arguments: Any, **named: Any) -> Any:
        """Return the norm, the same on all ranks."""
        return self._team.kept("clip_grad_norm_", self._engine.device, lambda: stock(of, *arguments, **named))

    def check_trigger(self, stock: Callable[..., Any], of: Any) -> bool:
        """Return whether a process has set its trigger; one that is set in a step that is over no longer counts."""
        found: bool = stock(of)
        if self._replay is not None:
            of.flag_tensor = None  # as before the first call; stock keeps it if no other process has set one
        return found

    # --- those who train, and those who come back -------------------------------------------------------

    def _open(self) -> None:
        """Begin the next step, together with the newcomers that rejoin in it."""
        self._engine.open_step()
        self._meet()
        self._team.record = self._record

    def _arrive(self) -> None:
        """Take part from the next micro-batch on."""
        assert self._replay is not None, "it comes back"
        self._replay.end()
        self._replay, self._session.hooks.passes = None, False
        self._forms.clear()
        with self._touch.lifted():  # for the last time
            draw_on(self._device, self._randomness)
        self._team.passed(self._live)
        self._team.record = self._record

    def _meet(self) -> tuple[Record, Any] | None:
        """Return, on a newcomer, the others' record and the first live rank's random numbers; None on the others. All
        ranks call it before a step. Raises RecycleError if no live rank has the record, or if it was too large to keep.
        """
        team, is_new = self._team, self._session.view.newcomer and self._team.record is None
        state = NEW if is_new else WITHOUT if self._loss is None else WITH  # a loss may be NaN
        own = torch.tensor([[state, self._loss or 0.0]], dtype=torch.float64)
        with team.unkept():
            while True:
                rows = {rank: row[0].tolist() for rank, row in team.rows(own).items()}
                old = [rank for rank, (state, _) in rows.items() if state != NEW]
                losses = [loss for state, loss in rows.values() if state == WITH]
                behind = [sum(losses) / len(losses)] if losses else []
                if len(old) == len(rows):
                    self._record.losses += behind
                    return None
                if not old:
                    raise RecycleError(
                        "all ranks that had run the loop's steps were lost while others came back: start the job "
                        "again, from a checkpoint"
                    )
                gives = self._session.rank == old[0]
                found = team.objects((self._told(behind), drawn(self._device)) if gives else None)
                if old[0] in found:
                    self._record.losses += behind if not is_new else []
                    return self._taken(*found[old[0]]) if is_new else None

    def _told(self, behind: list[float]) -> Record:
        return replace(self._record, losses=self._record.losses + behind)

    def _taken(self, record: Record, randomness: Any) -> tuple[Record, Any]:
        if record.full:
            raise RecycleError(
                f"the loop with Accelerate has gathered and reduced more than {MOST >> 20} MiB, which a replica that "
                "comes back would need: reduce it on each process before it is gathered"
            )
        return record, randomness

    def _stand_in(self, compute: Callable[[], Any], given: Any) -> Any:
        """Return zeros shaped like ``compute()``, called once per input shape; the first number is the loss."""
        assert self._replay is not None, "it comes back"
        key = _shapes(given, self._engine.training)
        if self._agreed(key is None or key not in self._forms):
            leaves, self._forms[key] = tree_flatten(compute())
            self._forms[key] = [_form(leaf) for leaf in leaves], self._forms[key]
        forms, tree = self._forms[key]
        made = [
            torch.zeros(form.shape, dtype=form.dtype, device=form.device) if isinstance(form, Form) else form
            for form in forms
        ]
        number = next(
            (each for each in made if torch.is_tensor(each) and each.is_floating_point() and not each.ndim), None
        )
        if number is not None and not self._replay.over:
            number.fill_(self._replay.losses[self._replay.step])
        return tree_unflatten(made, tree)

    def _agreed(self, wanted: bool) -> bool:
        """Return whether any rank of this seat's group wants it, if they compute together (ZeRO-3)."""
        group = self._session.hooks.seat_group
        if group is None or self._engine.zero_optimization_stage() < ZeroStageEnum.weights:
            return wanted
        flag = torch.tensor([wanted], dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def _refuse_read(self) -> None:
        raise RecycleError(
            f"a parameter is read or written at {calling_line()}, in a step that was over before this replica came "
            "back, which lacks that step's weights: do that after the last step, or on one process only, or set "
            'recycle.rejoin to "never"'
        )


class Form(NamedTuple):
    """The dtype and shape of a tensor in a forward's kept result."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _form(leaf: Any) -> Any:
    return Form(leaf.shape, leaf.dtype, leaf.device) if torch.is_tensor(leaf) else leaf


def _shapes(given: Any, trains: bool) -> Any:
    """Return the properties of the inputs that decide the shapes of a forward's result; None if they don't."""
    leaves, tree = tree_flatten(given)
    if any(not isinstance(leaf, KNOWN) for leaf in leaves):
        return None
    return trains, str(tree), tuple(map(_form, leaves))
