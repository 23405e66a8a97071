"""Where Accelerate and the Trainer begin to follow the live ranks: once DeepSpeed's engine is built for them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import shown
from recycle_plugin.versions import HUGGING_FACE, releases

TRAINER, LOOP = "Hugging Face's Trainer", "Hugging Face's Accelerate"
DRIVERS = {"transformers": TRAINER, "accelerate": LOOP}
MODELS = "transformers.modeling_utils"
TRAINERS = "transformers.trainer"
IMPLIED = {"batch": "shrink", "rejoin": "never"}


def driver(packages: Iterable[str]) -> str | None:
    """Return the library that drives the engine, found by the packages that build it; None if the script drives it."""
    found = {*packages}
    return next((said for name, said in DRIVERS.items() if name in found), None)


def section(driver: str | None, given: Any) -> Any:
    """Return the section ``given`` with the implied settings if ``driver`` trains replicas: its loop draws a fixed
    number of micro-batches per step, and counts steps from the first.
    """
    if driver is None or not isinstance(given, dict) or given.get("replicas") is None:
        return given
    return IMPLIED | given


def check(driver: str, settings: Settings, session: Session, trains: bool = True) -> None:
    """Raise RecycleError for unsupported settings, before the engine is built. ``trains``: it gets an optimizer."""
    for release in releases(HUGGING_FACE if driver == TRAINER else ["accelerate"]):
        if not release.fits:
            raise RecycleError(f"{release.wrong}, or set recycle.enabled to false")
    if driver == TRAINER and not trains:
        raise RecycleError(
            f"evaluate() or predict() before train() with {TRAINER}, whose engine can't train then: call them after "
            "train(), or set eval_on_start; in a script that does not train set recycle.enabled to false"
        )
    loop = "write the loop with engine(…), engine.backward(loss) and engine.step() of deepspeed.initialize"
    if settings.batch != "shrink":
        raise RecycleError(
            f'recycle.batch "{settings.batch}" with {driver}, which draws a fixed number of micro-batches for each '
            f"step: leave it out, and batches shrink while a replica is out; or {loop}"
        )
    if settings.group_sums == "scale":
        raise RecycleError(
            f'recycle.group_sums "scale" with {driver}, whose num_processes counts live ranks: leave it out'
        )
    if session.view.newcomer and not _returns(settings):
        raise RecycleError(
            f"recycle.rejoin {shown(settings.rejoin)} with {driver}: a lost replica can't come back while the job runs"
        )


def loads_last(driver: str | None) -> bool:
    """Return whether ``driver`` loads checkpoints only before its first step and after its last."""
    return driver == TRAINER


def imported(module: ModuleType, session: Session) -> None:
    """Prepare ``module`` (accelerate.accelerator, being imported) for calls that scripts make before the engine is
    built.
    """
    from recycle_plugin.adapters.hugging_face import loop, one_process

    loop.note_trackers(module, session)
    one_process.install(session)


def trainer_imported(module: ModuleType, session: Session) -> None:
    """Prepare ``module`` (transformers.trainer, being imported): a newcomer's Trainer loads no checkpoint. It gets its
    peers' state, and a checkpoint that its script has found may be half written, or deleted since.
    """
    stock = module.Trainer.train

    @functools.wraps(stock)
    def train(of: Any, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        from_peers = session.view.outside and of.is_deepspeed_enabled
        return stock(of, None if from_peers else resume_from_checkpoint, *arguments, **named)

    module.Trainer.train = train


def _returns(settings: Settings) -> bool:
    return settings.rejoin not in ("never", 0)


def follow(driver: str, settings: Settings, session: Session, engine: Any) -> None:
    """Have the imported packages follow the live ranks from now on; ``engine``: a ReplicaEngine."""
    import torch.distributed as dist
    from accelerate import PartialState

    from recycle_plugin.adapters.hugging_face import operations
    from recycle_plugin.adapters.hugging_face.team import Team
    from recycle_plugin.runtime.collectives.group import MemberGroup

    group = dist.group.WORLD
    assert isinstance(group, MemberGroup), "or its engine had been refused"
    if (counted := PartialState().num_processes) != group.size():
        raise RecycleError(
            f"Accelerate counts {counted} process{'es' * (counted > 1)} of {group.size()}, and each would have all "
            "samples: on a machine without accelerators call accelerate.PartialState(cpu=True) first"
        )
    if session.view.is_first:
        session.note(
            "data",
            f"with {driver} a lost replica's micro-batches are in no step" + ", until it has come back (batch shrink)"
            if _returns(settings)
            else f"with {driver} a lost replica stays away until the job is started again, and its micro-batches are "
            f"in no step (batch shrink, rejoin {settings.rejoin})",
        )
    team = Team(session, group, lambda: engine.between_steps)
    operations.install(team)
    if MODELS in sys.modules:  # in stock only global rank 0 writes files of save_pretrained
        first = lambda stock, model, is_main_process: is_main_process and team.is_first
        operations.wrap_method(sys.modules[MODELS].PreTrainedModel, "should_save_on_this_rank", first)
    if driver == TRAINER:
        from recycle_plugin.adapters.hugging_face import trainer
        from recycle_plugin.adapters.hugging_face.returns import Returns

        trainer.install(team, Returns(team, session, engine) if _returns(settings) else None)
    else:
        from recycle_plugin.adapters.hugging_face import loop

        loop.install(team, lambda: engine.module.training)
        if _returns(settings):
            from recycle_plugin.adapters.hugging_face import passing

            passing.install(team, session, engine)
