"""Make one typed and resolved :class:`TrainingJob` from Hydra overrides; the only module that knows Hydra.

Ranks use Hydra's compose API instead of ``@hydra.main``. The launcher passes every rank a ``--local_rank``, which Hydra
refuses, and the run folder must not depend on the time at which a rank reads its clock.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from recycle_plugin.core.vocabulary.instruction import Instruction
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError, shown

CONFIGS = "recycle_plugin.configs"


class ComposeError(ValueError):
    """An override or a value is wrong; the message is one line that says which."""


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class GPTModel(_Section):
    """The shape of a GPT; ``sequence`` in tokens; ``tied``: its head's weights are the embedding's."""

    kind: Literal["gpt"]
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    sequence: PositiveInt
    vocabulary: PositiveInt
    dropout: float = Field(ge=0, lt=1)
    tied: bool

    @property
    def pipeline_layers(self) -> int:
        """Layers to spread over stages: embedding, transformer layers, head; a tied head counts apart from its norm."""
        return self.layers + 2 + self.tied


class EmulatedModel(_Section):
    """Layers of these milliseconds a micro-batch, ``slow_times`` as long on ``slow_rank``, on ``width`` numbers."""

    kind: Literal["emulated"]
    layers: PositiveInt
    width: PositiveInt
    forward_ms: float = Field(ge=0)
    input_ms: float = Field(ge=0)
    weight_ms: float = Field(ge=0)
    slow_rank: int | None = Field(ge=0)
    slow_times: float = Field(gt=0)

    @property
    def pipeline_layers(self) -> int:
        return self.layers


class JobTopology(_Section):
    """A job's numbers of stages, of replicas, and of micro-batches of a replica in a step."""

    stages: PositiveInt
    replicas: PositiveInt
    micro_batches: PositiveInt


class TextData(_Section):
    """Text files whose bytes are the tokens."""

    kind: Literal["text"]
    path: str | None
    limit_bytes: PositiveInt


class IndexedFiles(_Section):
    """Megatron's .bin and .idx files; ``path``: their common prefix."""

    kind: Literal["indexed"]
    path: str | None


class OptimizerSection(_Section):
    """DeepSpeed's own optimizer section."""

    type: str
    params: dict[str, Any]


class TrainingJob(_Section):
    """Everything that a training script needs, as plain values."""

    steps: PositiveInt
    micro_batch_size: PositiveInt
    gradient_clipping: float = Field(ge=0)
    seed: int = Field(ge=0)
    run_dir: str = Field(min_length=1)
    report_every: int = Field(ge=0)
    save_parameters: bool
    model: GPTModel | EmulatedModel = Field(discriminator="kind")
    topology: JobTopology
    data: TextData | IndexedFiles = Field(discriminator="kind")
    optimizer: OptimizerSection
    deepspeed: dict[str, Any] | None
    recycle: dict[str, Any]

    @property
    def workers(self) -> int:
        return self.topology.stages * self.topology.replicas

    def deepspeed_config(self) -> dict[str, Any]:
        """Return the dictionary for ``deepspeed.initialize(config=...)``, including the ``"recycle"`` section."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.topology.micro_batches,
            "gradient_clipping": self.gradient_clipping,
            "optimizer": {"type": self.optimizer.type, "params": dict(self.optimizer.params)},
            "steps_per_print": self.report_every or 10**9,
            **(self.deepspeed or {}),
            "recycle": dict(self.recycle),
        }

    @property
    def precision(self) -> str:
        """The precision by the DeepSpeed config: "fp32", "bf16" or "fp16"."""
        asked = (name for name in ("bf16", "fp16") if (self.deepspeed or {}).get(name, {}).get("enabled"))
        return next(asked, "fp32")


def compose(overrides: Sequence[str] = ()) -> TrainingJob:
    """Return the job that ``configs/`` and ``overrides`` (``model=gpt_tiny``, ``steps=20``, ...) describe. Raises
    :class:`ComposeError`, or :class:`~recycle_plugin.settings.wording.SettingsError` for the ``recycle`` section.
    """
    job = _typed(_composed(overrides))
    _check_faults(job)
    if job.topology.stages > job.model.pipeline_layers:
        raise ComposeError(
            f"topology.stages: {job.topology.stages} stages for {job.model.pipeline_layers} layers; "
            f"write at most {job.model.pipeline_layers}, or raise model.layers"
        )
    if isinstance(job.model, GPTModel) and job.model.hidden % job.model.heads:
        raise ComposeError(
            f"model.heads: {job.model.heads} does not divide model.hidden = {job.model.hidden}; write a divisor"
        )
    return job


def compose_from_command_line(arguments: Sequence[str], description: str, workers: int | None = None) -> TrainingJob:
    """Return the job that a rank's command line describes, as :func:`compose` makes it.

    ``workers``: how many were started, to check the topology. An error ends the script with one line (SystemExit).
    Every rank raises the same; under ``recycle_plugin.launch`` the coordinator prints it once.
    """
    parser = argparse.ArgumentParser(
        description=description, epilog="groups and keys: see configs/ (recycle_plugin.configs)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides: model=gpt_tiny steps=20")
    # from the launcher; the environment has it too
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    found, unknown = parser.parse_known_intermixed_args(arguments)
    try:
        if unknown:
            raise ComposeError(f"{unknown[0]} is no option; write overrides as key=value")
        job = compose(found.overrides)
        if workers not in (None, job.workers):
            raise ComposeError(
                f"topology: {job.topology.replicas} replicas of {job.topology.stages} stages need {job.workers} "
                f"workers, and {workers} started; launch with deepspeed --num_gpus {job.workers}"
            )
        return job
    except (ComposeError, SettingsError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def _composed(overrides: Sequence[str]) -> Any:
    OmegaConf.register_new_resolver("half", lambda number: int(number) // 2, replace=True)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIGS, version_base="1.3"):
            return OmegaConf.to_container(hydra_compose("config", list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        unknown = re.match(r"Could not override '(.+?)'", str(error))
        raise ComposeError(_no_such_key(unknown[1]) if unknown else _flat(str(error))) from None


def _typed(tree: Any) -> TrainingJob:
    try:
        return TrainingJob.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part not in ("gpt", "emulated", "text", "indexed"))
        value = "" if first["type"] == "missing" else f"{shown(first['input'])}; "
        raise ComposeError(f"{where}: {value}{first['msg'].lower()}") from None


def _check_faults(job: TrainingJob) -> None:
    """Refuse a fault in a step that the run never reaches: it would test nothing."""
    for number, fault in enumerate(Settings.from_section(job.recycle).fault_list):
        step = None if fault.when == "at" else Instruction.parse(fault.where).step
        # steps of evaluations are negative, and their number is not known
        if step is not None and step >= 0 and not 1 <= step <= job.steps:
            raise ComposeError(
                f"recycle.faults[{number}]: '{fault}' names step {step}, and the run has steps 1 to {job.steps}; "
                f"write a step such as {fault.where.partition('@')[0]}@{(job.steps + 1) // 2}"
            )


def _no_such_key(key: str) -> str:
    known = _keys(_composed(()))
    if key in known:
        return f"{key}: the chosen {key.partition('.')[0]} has no such key; see configs/{key.partition('.')[0]}/"
    near = difflib.get_close_matches(key, known, 1)
    return f"{key}: no such key; " + (f"did you mean {near[0]}?" if near else "see configs/config.yaml and its groups")


def _keys(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Return all dotted keys of a composed tree."""
    keys = []
    for name, value in tree.items():
        keys.append(prefix + name)
        keys += _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else []
    return keys


def _flat(text: str) -> str:
    """Return Hydra's message as one line, without its search path and its dump of the object."""
    text = re.split(r"Config search path|\n\s*full_key:|\n\s*object_type=|See https?:", text)[0]
    return " ".join(text.split())
