"""Undo by inverting the update rule (SWIFT's update-undo; sources in the package's docstring).

Not exact. Each element comes back within a few roundings of the *largest* value that met in it: of p and the update for
parameters, of m and (1 − β1)·g for a first moment, of v and (1 − β2)·g² for a second. After ordinary gradients 97% of
Adam's fp32 parameters are bit-equal and the others one rounding off (70% for SGD with weight decay). After a gradient
spike, values that were small beside it are gone. A redo with the same gradient, as in recovery, meets the same large
values and ends where the first try ended, within the same few roundings. With another gradient it continues with
moments that have forgotten the time before the spike.

Refused: parameters in other types than fp32 and fp64 (bf16 would lose 2⁻⁸ of its value, fp16 2⁻¹¹), AMSGrad, unknown
optimizers, sparse gradients, and a script's hooks around the step that may change what the rule is inverted from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.state.putting import Putting
from recycle_plugin.runtime.state.stage_state import StageState, as_text, marks
from recycle_plugin.runtime.state.step_hooks import hooks_of, is_scripts
from recycle_plugin.runtime.state.undo import rules
from recycle_plugin.runtime.state.undo.kept import Keeper, KeptCopies, Small

DTYPES = (torch.float32, torch.float64)
LARGEST_DECAY = 0.5  # of lr × weight decay: undo divides by 1 minus this, and rounding grows with it


class Inverse:
    """Undo by inverting the update rule, from the gradients as they are at ``before_step()``.

    ``keeper`` has most of them anyway. A gradient that a hook has replaced is copied, since p.grad does not outlive the
    step: Nesterov with ``foreach`` adds the momentum into it, and zero_grad() may zero it. Raises RecycleError for
    optimizers and parameters whose steps cannot be taken back.
    """

    exact = False

    def __init__(self, state: StageState, keeper: Keeper | None = None) -> None:
        self._whole, self._of = state, state.optimizer
        self._optimizer = state.optimizer.optimizer
        self._rule = rules.of(self._optimizer)
        self._small = Small(state)
        self._keeper = keeper
        self._kept: set[str] = set()  # names of gradients that the keeper has
        self._gradients = KeptCopies()  # all other gradients
        self._others = KeptCopies()  # state tensors that the rule does not invert: step counts
        self._seen: object = None  # marks of the state before hooks of the script that run before the step
        # stock optimizers' own tensors are scratch
        stock = type(self._optimizer).__module__.startswith(("torch.", "deepspeed."))
        attributes = {} if stock else self._of.attributes.tensors()
        _check_parameters(self._of.parameters(), {**self._of.beside(), **attributes})
        _check_groups(self._optimizer, self._rule)

    @property
    def held_bytes(self) -> int:
        """Bytes of copied gradients and of state that is not inverted."""
        return self._gradients.nbytes + self._others.nbytes

    def prepare(self) -> None:
        """Forget the last step."""
        self._small.forget()

    @torch.no_grad()
    def before_hooks(self) -> None:
        """Note the state, if hooks of the script are about to run: they may change gradients only."""
        self._seen = self._marks() if any(map(is_scripts, hooks_of(self._optimizer)[0])) else None

    def _marks(self) -> object:
        return as_text(self._of.shared()), marks(self._whole.tensors(following=False))

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep gradients, and values that can't be computed back. Raises RecycleError if the step could not be taken
        back.
        """
        _check_groups(self._optimizer, self._rule)
        _check_hooks(self._optimizer)
        seen, self._seen = self._seen, None
        if seen is not None and seen != self._marks():
            raise _refused(
                "cannot take back what the script's hooks change before a step other than gradients",
                'write "snapshot", or make the change between steps',
            )
        parameters = self._of.parameters()
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        if any(gradient.is_sparse for gradient in gradients.values()):
            raise _refused("cannot take a step with sparse gradients back", 'write "snapshot", or use sparse=False')
        for parameter in parameters.values():
            if parameter in self._optimizer.state:
                self._state(parameter)
        keeper = self._keeper
        self._kept = {
            name for name, one in gradients.items() if keeper is not None and keeper.holds(parameters[name], one)
        }
        self._gradients.take({name: one for name, one in gradients.items() if name not in self._kept})
        self._others.take({key: value for key, value in self._of.kept().items() if key[1] not in self._rule.moments})
        self._small.take()

    @torch.no_grad()
    def restore(self) -> None:
        """Take the step back. Raises RecycleError, and changes nothing, if something in it is not finite."""
        groups = self._small.parts["optimizer"]["groups"]
        for step in self._steps(groups):
            self._check_finite(step)
        for step in self._steps(groups):
            self._rule.invert(step)
        self._small.put_back()
        self._others.put_back(self._of.kept())
        self._whole.rewritten()

    def _steps(self, groups: list[dict[str, Any]]) -> Iterator[rules.AppliedStep]:
        """Yield the gradient applied to each parameter that had one, with the hyper-parameters used then."""
        named = {parameter: name for name, parameter in self._of.parameters().items()}
        for group, told in zip(self._optimizer.param_groups, groups, strict=True):
            saved = Putting().into({}, told.items())
            stepped = [(p, self._state(p)) for p in group["params"] if self._was_stepped(named[p])]
            counts = self._rule.counts([state for _, state in stepped])
            for (parameter, state), count in zip(stepped, counts, strict=True):
                gradient = self._gradient(named[parameter], parameter)
                yield rules.AppliedStep(
                    parameter, state, -gradient if saved.get("maximize") else gradient, saved, count
                )

    def _was_stepped(self, name: str) -> bool:
        return name in self._kept or name in self._gradients

    def _gradient(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        if name in self._gradients:
            return self._gradients[name]
        assert self._keeper is not None, "somebody keeps it"
        return self._keeper.applied_to(parameter)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a stepped parameter; raises RecycleError if it lacks something."""
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        missing = [name for name in self._rule.needs if name not in state]
        if missing:
            name = type(self._optimizer).__name__
            raise _refused(
                f"cannot take a step of {name} back, which leaves no {missing[0]} in a parameter's state",
                'write "snapshot"',
            )
        return state

    def _check_finite(self, step: rules.AppliedStep) -> None:
        moments = [step.state[name] for name in self._rule.moments if torch.is_tensor(step.state.get(name))]
        if not all(_is_finite(tensor) for tensor in (step.gradient, step.parameter, *moments)):
            raise _refused(
                "cannot take the last step back, because a gradient or a result of it is infinite or not a number",
                'write "snapshot"',
            )


def _check_parameters(parameters: Mapping[str, torch.Tensor], beside: Mapping[str, torch.Tensor]) -> None:
    if beside:
        raise _refused(
            "cannot take back steps of an optimizer that has parameters or attributes of its own beside the model's",
            'write "snapshot"',
        )
    stepped = [one for one in parameters.values() if one.requires_grad]  # frozen ones never are
    for dtype in {parameter.dtype for parameter in stepped}:
        if dtype not in DTYPES:
            raise _refused(
                f"needs parameters in fp32 or fp64, and there are some in {str(dtype).removeprefix('torch.')}",
                'write "snapshot"',
            )


def _check_groups(optimizer: torch.optim.Optimizer, rule: rules.UpdateRule) -> None:
    for group in optimizer.param_groups:
        if missing := sorted(set(rule.settings) - group.keys()):
            name = type(optimizer).__name__
            raise _refused(
                f"cannot take a step of {name} back, which has no {', '.join(missing)} in its groups",
                'write "snapshot", or give them their values there',
            )
        if group.get("amsgrad"):
            raise _refused(
                "cannot take AMSGrad back, whose running maximum of v forgets what it was",
                'write "snapshot", or set amsgrad to false',
            )
        decay = float(group["lr"]) * float(group["weight_decay"])
        if decay > LARGEST_DECAY:
            raise _refused(
                f"cannot take a step back with lr x weight_decay = {decay:g}",
                f'write "snapshot", or stay at {LARGEST_DECAY:g} or less',
            )


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a script's hooks that run between the record of a step and its end."""
    before, after = hooks_of(optimizer)
    own = next((place for place, hook in enumerate(before) if not is_scripts(hook)), len(before))
    if (hook := next(filter(is_scripts, (*before[own:], *after)), None)) is not None:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise _refused(
            f"cannot take a step back that the script's hook {name} may change",
            'write "snapshot", or leave the hook out',
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite, in one pass: a NaN becomes both minimum and maximum."""
    return tensor.numel() == 0 or all(map(torch.isfinite, torch.aminmax(tensor)))


def _refused(what: str, instead: str) -> RecycleError:
    return RecycleError(f'recycle.undo: "inverse" {what}; {instead}')
