"""What scripts do with weights between steps, whatever object they train with."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from wrappers import wait_until


@dataclass(frozen=True)
class Script:
    """Of one that calls ``method`` of an ``owner`` for each step, which has a ``module`` and a ``seat``: the ``steps``
    so far, the ``optimizer``, and the ``dtype`` of what goes between stages.
    """

    owner: type
    method: str
    steps: Callable[[Any], int]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    dtype: Callable[[Any], torch.dtype]

    def after_each(self, do: Callable[[Any], None]) -> None:
        train = getattr(self.owner, self.method)

        def changed(engine: Any, *given: Any) -> Any:
            loss = train(engine, *given)
            do(engine)
            return loss

        setattr(self.owner, self.method, changed)

    # --- ways to read and write them: each gives what it found -----------------------------------------

    def parameters(self, engine: Any) -> list[torch.Tensor]:
        return [parameter.detach().clone() for _, parameter in engine.module.named_parameters()]

    def saved(self, engine: Any) -> list[torch.Tensor]:
        file = io.BytesIO()
        torch.save(list(engine.module.parameters()), file)
        file.seek(0)
        return [parameter.detach() for parameter in torch.load(file, weights_only=False)]

    def evaluated(self, engine: Any) -> list[torch.Tensor]:
        """By hand, first in another precision; the shapes of the smallest GPT, and of the plain job."""
        given = (
            torch.arange(16)[None]
            if engine.seat.stage == 0
            else torch.linspace(-1, 1, 256, dtype=self.dtype(engine)).view(16, 1, 16)
        )
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                engine.module(given)
            return [engine.module(given)]

    def moments(self, engine: Any) -> list[torch.Tensor]:
        return [state["exp_avg"].clone() for state in self.optimizer(engine).state.values()]

    def averaged(self, engine: Any) -> list[torch.Tensor]:
        trained = list(engine.module.parameters())
        averages = vars(engine).setdefault(
            "averages", [torch.zeros_like(parameter, requires_grad=False) for parameter in trained]
        )
        with torch.no_grad():
            torch._foreach_lerp_(averages, trained, 0.1)
        return [average.clone() for average in averages]

    def shrunk(self, engine: Any) -> list[torch.Tensor]:
        for parameter in engine.module.parameters():
            parameter.data.mul_(0.999)
        return self.parameters(engine)


def touch_weights(script: Script, folder: str, alone: str, flag_at: int = 0) -> None:
    """After each step a script reads and writes weights, each time in another order: what it found goes to
    folder/seat<replica.stage>.pt.  After every third step only the seat ``alone`` reads, and nobody writes; every
    second time the others wait for it in a collective.  Before that of step ``flag_at`` folder/<seat> is made.
    """
    ways, found = (
        [script.parameters, script.saved, script.evaluated, script.moments, script.averaged, script.shrunk],
        {},
    )
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def touch(engine: Any) -> None:
        step = script.steps(engine)
        together = step % 3 > 0
        if step == flag_at:
            (place / str(engine.seat)).touch()
        engine.module.eval()
        if together or str(engine.seat) == alone:
            mine = ways if together else ways[:-1]
            first = step % len(mine)
            found[step] = {way.__name__: way(engine) for way in mine[first:] + mine[:first]}
        if step % 6 == 3:
            torch.distributed.barrier()
        torch.save(found, place / f"seat{engine.seat}.pt")

    script.after_each(touch)


def wait_for_reader(script: Script, folder: str, alone: str) -> None:
    """After each step the script's workers wait, where the plugin does not see it, until the one at ``alone`` has read
    its weights.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def wait(engine: Any) -> None:
        flag = place / f"step{script.steps(engine)}"
        if str(engine.seat) == alone:
            script.parameters(engine)
            flag.touch()
        wait_until(flag.exists, str(flag))

    script.after_each(wait)
