"""The entry of the plugin into an unmodified training script.

The script imports torch and DeepSpeed when and how it likes. An import hook then wraps public functions: some of
``torch.distributed``, so that groups can lose members, and ``deepspeed.initialize``. That builds the plugin's engine if
the config switches it on, else the stock one, untouched.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import ModuleType
from typing import Any

from recycle_plugin.adapters.hugging_face import entry as hugging_face
from recycle_plugin.adapters.unlaunched import AfterImport
from recycle_plugin.errors import RecycleError
from recycle_plugin.runtime.control.session import Session
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SECTION, refuse_misspelt
from recycle_plugin.versions import RANGES, releases

TORCHS = {
    "torch.distributed": (
        "init_process_group",
        "new_group",
        "split_group",
        "shrink_group",
        "broadcast_object_list",
        "scatter_object_list",
        "all_gather_object",
        "gather_object",
        "batch_isend_irecv",
        "monitored_barrier",
    ),
    "torch.distributed.checkpoint": ("save", "async_save", "load"),
}
"""Functions of torch's modules; each is replaced by the one of its name in runtime/collectives/calls.py."""


class Plugin:
    """The plugin in this process, which wraps torch.distributed and ``deepspeed.initialize``."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._made = False  # an engine of the plugin's

    def install(self) -> None:
        """Wrap the functions once they are imported. Call it before the training script runs."""
        wrappers = {
            "deepspeed": self._wrap_deepspeed,
            "accelerate.accelerator": self._prepare_accelerate,
            hugging_face.TRAINERS: self._prepare_trainer,
        }
        AfterImport({**dict.fromkeys(TORCHS, self._wrap_torch), **wrappers}).install()

    def _prepare_accelerate(self, module: ModuleType) -> None:
        hugging_face.imported(module, self.session)

    def _prepare_trainer(self, module: ModuleType) -> None:
        hugging_face.trainer_imported(module, self.session)

    # --- torch -------------------------------------------------------------------------------------

    def _wrap_torch(self, module: ModuleType) -> None:
        for name in TORCHS[module.__name__]:
            stock = getattr(module, name, None)
            if stock is not None:  # releases differ
                _put_in_place(module.__name__, name, stock, self._instead(name, stock))

    def _instead(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            from recycle_plugin.runtime.collectives import calls  # imports torch

            return getattr(calls, name)(self.session, stock, *arguments, **named)

        return wrapped

    # --- DeepSpeed ---------------------------------------------------------------------------------

    def _wrap_deepspeed(self, module: Any) -> None:
        from recycle_plugin.patches import deepspeed_cpu

        deepspeed_cpu.apply()
        stock = module.initialize

        @functools.wraps(stock)
        def initialize(*arguments: Any, **named: Any) -> Any:
            config = find_config(arguments, named)
            self._check_section(config)
            driver = hugging_face.driver(
                frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_stack(sys._getframe(1))
            )
            settings = Settings.from_section(hugging_face.section(driver, config.get(SECTION)))
            if not settings.enabled:
                self.session.configured = True
                return stock(*arguments, **named)
            given = dict(zip(("args", "model", "optimizer", "model_parameters", "training_data"), arguments)) | named
            from recycle_plugin.adapters.deepspeed.monitors import opening  # imports DeepSpeed

            ours = self._our_engine if settings.replicas is None else partial(self._replica_engine, driver)
            with ours(module, config, settings, given), opening(self.session):
                built = stock(*arguments, **named)
            self._made = True
            if driver is not None and settings.replicas is not None:
                hugging_face.follow(driver, settings, self.session, built[0])
            return built

        module.initialize = initialize

    def _check_section(self, config: dict[str, Any]) -> None:
        """Warn if the config has no section, and refuse a misspelt one: a job started by the plugin is to use it."""
        try:
            refuse_misspelt(config)
        except ValueError as error:
            raise RecycleError(str(error)) from None
        section = config.get(SECTION, {})
        if config and isinstance(section, dict) and "enabled" not in section and self.session.view.is_first:
            missing = f'"{SECTION}" section' if SECTION not in config else f"{SECTION}.enabled"
            self.session.note(
                "warning",
                f"there is no {missing} in the DeepSpeed config: this is stock DeepSpeed, and the loss of a worker "
                "ends the job; "
                f'write "{SECTION}": {{"enabled": true}}, or false',
            )

    @contextmanager
    def _our_engine(
        self, module: Any, config: dict[str, Any], settings: Settings, given: dict[str, Any]
    ) -> Iterator[None]:
        """A context in which ``deepspeed.initialize`` builds our engine, over PipelineEngine or a user's subclass."""
        check_versions()
        from recycle_plugin.adapters.deepspeed.engine import EngineArguments, engine_class
        from recycle_plugin.adapters.deepspeed.engine_checks import check_config, check_dataset, check_placement
        from recycle_plugin.runtime.collectives import group

        self._check_once()
        if module.comm.is_initialized():
            group.check_backend(sys.modules["torch.distributed"].get_backend())
        check_config(config, given.get("model"), given.get("optimizer"), given.get("model_parameters"))
        check_dataset(given.get("training_data"))
        check_placement(settings.placement, given.get("model"), os.environ["RECYCLE_PLACEMENT"])
        self.session.configure(settings.deadlines, settings.group_sums)
        stock, module.PipelineEngine = (
            module.PipelineEngine,
            engine_class(module.PipelineEngine, EngineArguments(self.session, settings)),
        )
        try:
            yield
        finally:
            module.PipelineEngine = stock

    @contextmanager
    def _replica_engine(
        self, driver: str | None, module: Any, config: dict[str, Any], settings: Settings, given: dict[str, Any]
    ) -> Iterator[None]:
        """A context in which ``deepspeed.initialize``, called by ``driver`` or the script, builds a rank's engine."""
        check_versions()
        from recycle_plugin.adapters.deepspeed.engine_checks import backend
        from recycle_plugin.adapters.deepspeed.replica.engine import ReplicaArguments, engine_class
        from recycle_plugin.adapters.deepspeed.replica.refusals import check
        from recycle_plugin.runtime.collectives import group

        self._check_once()
        assert settings.replicas is not None, "or it would be the other engine"
        if driver is not None:
            trains = given.get("optimizer") is not None or bool(config.get("optimizer"))
            hugging_face.check(driver, settings, self.session, trains)
        check(config, given, settings.replicas, int(os.environ["WORLD_SIZE"]))
        module.init_distributed(dist_backend=backend())
        group.check_backend(sys.modules["torch.distributed"].get_backend())
        self.session.configure(settings.deadlines, settings.group_sums)
        stock, module.DeepSpeedEngine = (
            module.DeepSpeedEngine,
            engine_class(
                ReplicaArguments(
                    self.session, settings.for_replicas(), settings.replicas, hugging_face.loads_last(driver)
                )
            ),
        )
        try:
            yield
        finally:
            module.DeepSpeedEngine = stock

    def _check_once(self) -> None:
        if self._made or self.session.hooks.trains:
            raise RecycleError(
                "deepspeed.initialize was called twice with recycle.enabled: only one engine per process is supported"
            )


def find_config(arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed config that ``deepspeed.initialize`` will find; {} if it is missing or no object."""
    config = named.get("config") or named.get("config_params")
    if config is None:
        command_line = named.get("args", arguments[0] if arguments else None)
        config = getattr(command_line, "deepspeed_config", None)
    if isinstance(config, (str, Path)) and Path(config).is_file():
        config = json.loads(Path(config).read_text())
    return config if isinstance(config, dict) else {}


def check_versions() -> None:
    """Raise RecycleError for unsupported releases; megatron-core's counts only if the script uses it."""
    used = [name for name in RANGES if name != "megatron-core" or "megatron.core" in sys.modules]
    wrong = next((one for one in releases(used) if not one.fits), None)
    if wrong is not None:
        raise RecycleError(
            f"{wrong.name} {wrong.installed} is installed, and the plugin needs {wrong.needs}: pip install "
            f"'{wrong.name}{wrong.needs}', "
            "or set recycle.enabled to false"
        )


def _put_in_place(package: str, name: str, stock: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
    """Replace ``stock``, named ``name``, by ``wrapped`` in every module of ``package`` that has it."""
    for module in [one for one in sys.modules.values() if getattr(one, "__name__", "").startswith(package)]:
        if vars(module).get(name) is stock:
            setattr(module, name, wrapped)
