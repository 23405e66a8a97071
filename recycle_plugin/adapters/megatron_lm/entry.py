"""The entry of the plugin into an unmodified Megatron-LM script.

The section ``recycle`` comes from ``--recycle-config FILE``, which Megatron's own parser does not see, or from the
environment variable RECYCLE_CONFIG. Without it, or with ``enabled: false``, Megatron-LM stays as it is. Otherwise an
import hook replaces a few globals of ``megatron.training.training``, which that module looks up at each call.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from packaging.specifiers import SpecifierSet

from recycle_plugin.adapters.unlaunched import AfterImport
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.runtime.system.console import print_whole
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SECTION

FLAG, VARIABLE = "--recycle-config", "RECYCLE_CONFIG"
EXAMPLE = 'name a JSON file with the settings, such as {"enabled": true}'
REPLACED = (
    "pretrain",
    "setup_model_and_optimizer",
    "load_checkpoint",
    "train_step",
    "evaluate",
    "save_checkpoint",
    "print_datetime",
    "print_rank_last",
    "is_last_rank",
    "get_tensorboard_writer",
    "get_wandb_writer",
    "get_signal_handler",
)
"""The globals of megatron.training.training that the plugin replaces."""
RELEASES = ">=0.16.1,<0.20"
"""The releases of Megatron-LM whose training loop this adapter knows."""


def install(session: Session, command: list[str]) -> list[str]:
    """Prepare for a Megatron-LM script if there are settings for one. Returns ``command`` without the plugin's flag.
    Raises RecycleError for an unreadable file, and SettingsError for wrong settings.
    """
    command, path = without_flag(command)
    path = path or os.environ.get(VARIABLE)
    settings = Settings.from_section(read_section(path)) if path else None
    if settings is not None and settings.enabled:
        MegatronPlugin(session, settings).install()
    elif settings is not None:
        session.configured = True
    return command


def without_flag(command: list[str]) -> tuple[list[str], str | None]:
    """Return a script's ``command`` without ``--recycle-config FILE``, and the file."""
    rest, found = list(command), None
    for place, argument in enumerate(command):
        name, given, value = argument.partition("=")
        if place and name == FLAG:
            if not given and place + 1 == len(command):
                raise RecycleError(f"{FLAG} has no file after it: write {FLAG} FILE, a JSON file with the settings")
            found = value if given else command[place + 1]
            del rest[place : place + (1 if given else 2)]
            break
    return rest, found


def read_section(path: str) -> dict[str, Any]:
    """Return the section in the JSON file ``path``: its value under "recycle", or the whole file."""
    try:
        section = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RecycleError(f"{FLAG} {path}: {error}; {EXAMPLE}") from None
    if not isinstance(section, dict):
        raise RecycleError(f"{FLAG} {path} is no JSON object: {EXAMPLE}")
    return section.get(SECTION, section)


class MegatronPlugin:
    """The plugin in a process that runs a Megatron-LM script."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session, self._settings = session, settings
        self._job: Any = None  # set once its model is built

    def install(self) -> None:
        """Have Megatron-LM's loop call the plugin once it is imported. Call it before the script runs."""
        from recycle_plugin.patches import megatron_lm_cpu

        # a worker that takes over Weights & Biases from a lost one resumes its run
        os.environ.setdefault("WANDB_RUN_ID", self._session.job_id)
        os.environ.setdefault("WANDB_RESUME", "allow")
        if megatron_lm_cpu.wanted():
            megatron_lm_cpu.apply()
        AfterImport({"megatron.training.training": self._wrap}).install()

    def _wrap(self, module: ModuleType) -> None:
        check_release()
        for name in REPLACED:
            setattr(module, name, self._instead(name, getattr(module, name)))
        # every stage knows these values already, so the others need not be asked
        module.reduce_max_stat_across_model_parallel_group = lambda stat, group=None: stat  # type: ignore[attr-defined]

    def _instead(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        ours = getattr(self, f"_{name}")

        @functools.wraps(stock)
        def called(*arguments: Any, **named: Any) -> Any:
            return ours(stock, *arguments, **named)

        return called

    # --- in the place of Megatron's ------------------------------------------------------------------

    def _pretrain(self, stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        given = inspect.signature(stock).bind(*arguments, **named).arguments
        for name in ("process_non_loss_data_func", "non_loss_data_func"):
            if given.get(name) is not None:
                raise RecycleError(
                    f"pretrain({name}=…): data other than losses is not gathered from a pipeline that can lose "
                    "workers; leave it out"
                )
        return stock(*arguments, **named)

    def _setup_model_and_optimizer(self, stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        from megatron.training import get_args
        from megatron.training.checkpointing import checkpoint_exists

        from recycle_plugin.adapters.megatron_lm import alone
        from recycle_plugin.adapters.megatron_lm import in_parts as states
        from recycle_plugin.adapters.megatron_lm.job import Job
        from recycle_plugin.adapters.megatron_lm.refusals import check, check_loaded, keep_whole, prepare

        args, config = get_args(), named.get("cfg_container")
        check(args, self._settings)
        prepare(args, config, self._session)
        alone.without_collectives()
        in_parts = args.use_distributed_optimizer
        loads_nothing = args.finetune or args.no_load_optim
        with alone.loading(self._session, args) as loaded:
            if in_parts and not loads_nothing and args.load and checkpoint_exists(args.load):
                with states.loaded(self._session, args, config) as whole:
                    made = whole(stock(*arguments, **named))
            else:
                keep_whole(args, config)
                made = stock(*arguments, **named)
            loaded(made[2])
        check_loaded(args)
        self._job = Job(self._session, self._settings, args, made[0], made[1], made[2], in_parts)
        return made

    def _load_checkpoint(self, stock: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call Megatron's own; its collectives are not kept for newcomers, which do not come here."""
        with self._session.hooks.startup.apart():
            return stock(*arguments, **named)

    def _train_step(
        self, stock: Callable[..., Any], forward_step: Any, data_iterator: Any, *rest: Any, **_: Any
    ) -> Any:
        return self._job.train_step(forward_step, data_iterator)

    def _evaluate(
        self,
        stock: Callable[..., Any],
        forward_step: Any,
        data_iterator: Any,
        model: Any,
        process_non_loss_data_func: Any,
        config: Any,
        verbose: bool = False,
        non_loss_data_func: Any = None,
        eval_iters: int | None = None,
        **_: Any,
    ) -> Any:
        return self._job.evaluate(forward_step, data_iterator, eval_iters), None, False

    def _save_checkpoint(
        self,
        stock: Callable[..., Any],
        iteration: int,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        operations: Any,
        *rest: Any,
        **_: Any,
    ) -> None:
        self._job.save(iteration, operations)

    def _print_datetime(self, stock: Callable[..., Any], string: str, override_timestamp: float | None = None) -> None:
        """Print without Megatron's barrier, to which a newcomer would come alone."""
        if self._session.rank == 0:
            at = datetime.now() if override_timestamp is None else datetime.fromtimestamp(override_timestamp)
            print_whole(f"[{string}] datetime: {at:%Y-%m-%d %H:%M:%S.%f}")

    def _print_rank_last(self, stock: Callable[..., Any], message: str) -> None:
        if self._job is None:
            stock(message)
        else:
            self._job.print(message)

    def _get_signal_handler(self, stock: Callable[..., Any]) -> Any:
        """Return a handler that reports no signals to Megatron's loop; early_exit.py asks the stock one."""
        return SimpleNamespace(signals_received=lambda: [False])

    def _get_tensorboard_writer(self, stock: Callable[..., Any]) -> Any:
        return self._writer(stock, "tensorboard", "tensorboard_dir")

    def _get_wandb_writer(self, stock: Callable[..., Any]) -> Any:
        return self._writer(stock, "wandb", "wandb_project")

    def _writer(self, stock: Callable[..., Any], kind: str, flag: str) -> Any:
        return stock() if self._job is None else self._job.writer(stock, kind, flag)

    def _is_last_rank(self, stock: Callable[..., Any]) -> bool:
        return stock() if self._job is None else self._job.prints


def check_release() -> None:
    """Raise RecycleError for a release of Megatron-LM that the adapter does not know."""
    from megatron.core import __version__

    if not SpecifierSet(RELEASES).contains(__version__, prereleases=True):
        raise RecycleError(
            f"this is Megatron-LM {__version__}, and the plugin knows {RELEASES}: use one of these, or set "
            "recycle.enabled to false"
        )
