"""Megatron-LM's flags that the plugin does not support, refused in one line each before a model is built."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from recycle_plugin.errors import RecycleError
from recycle_plugin.settings.schema import Settings

if TYPE_CHECKING:
    from recycle_plugin.runtime.control.session import Session


class Flag(NamedTuple):
    """A flag, refused if ``is_set`` of the attribute ``name`` of Megatron's arguments. ``instead``: what to write."""

    flag: str
    name: str
    is_set: Callable[[Any], bool]
    instead: str


def _besides(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


LEAVE = "leave it out"
ROWS = (
    Flag("--tensor-model-parallel-size", "tensor_model_parallel_size", _besides(0, 1), "write 1"),
    Flag("--context-parallel-size", "context_parallel_size", _besides(0, 1), "write 1"),
    Flag("--expert-model-parallel-size", "expert_model_parallel_size", _besides(0, 1), "write 1"),
    Flag("--num-experts", "num_experts", bool, LEAVE),
    Flag("--num-layers-per-virtual-pipeline-stage", "num_layers_per_virtual_pipeline_stage", bool, LEAVE),
    Flag("--num-virtual-stages-per-pipeline-rank", "num_virtual_stages_per_pipeline_rank", bool, LEAVE),
    Flag(
        "--pipeline-model-parallel-layout", "pipeline_model_parallel_layout",
        lambda value: value is not None and getattr(value, "virtual_pipeline_model_parallel_size", 1) > 1,
        "write a layout with one chunk for each stage",
    ),
    Flag("--skip-train", "skip_train", bool, "evaluate without the plugin, which trains"),
    Flag("--use-tp-pp-dp-mapping", "use_tp_pp_dp_mapping", bool, LEAVE),
    Flag("--use-torch-fsdp2", "use_torch_fsdp2", bool, LEAVE),
    Flag("--use-megatron-fsdp", "use_megatron_fsdp", bool, LEAVE),
    Flag("--use-custom-fsdp", "use_custom_fsdp", bool, LEAVE),
    Flag("--gtp-weight-remat-size", "gtp_weight_remat_size", _besides(0, 1), "write 1"),
    Flag("--enable-cuda-graph", "enable_cuda_graph", bool, LEAVE),
    Flag("--external-cuda-graph", "external_cuda_graph", bool, LEAVE),
    Flag("--cuda-graph-impl", "cuda_graph_impl", _besides("none"), 'write "none"'),
    Flag("--optimizer-cuda-graph", "optimizer_cuda_graph", bool, LEAVE),
    Flag("--use-nccl-ub", "nccl_ub", bool, LEAVE),
    Flag("--fp8-format", "fp8", bool, LEAVE),
    Flag("--fp4-format", "fp4", bool, LEAVE),
    Flag("--fp8-param-gather", "fp8_param_gather", bool, LEAVE),
    Flag("--mtp-num-layers", "mtp_num_layers", bool, LEAVE),
    Flag("--calculate-per-token-loss", "calculate_per_token_loss", bool, LEAVE),
    Flag("--gradient-accumulation-fusion", "gradient_accumulation_fusion", bool,
        "write --no-gradient-accumulation-fusion"),
    Flag("--defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute", bool, LEAVE),
    Flag("--optimizer", "optimizer", _besides("adam", "sgd"), 'write "adam" or "sgd"'),
    Flag("--optimizer-cpu-offload", "optimizer_cpu_offload", bool, LEAVE),
    Flag("--use-precision-aware-optimizer", "use_precision_aware_optimizer", bool, LEAVE),
    Flag("--decrease-batch-size-if-needed", "decrease_batch_size_if_needed", bool, LEAVE),
    Flag("--phase-transition-iterations", "phase_transition_iterations", bool, LEAVE),
    Flag("--iterations-to-skip", "iterations_to_skip", bool, LEAVE),
    Flag("--dataloader-type", "dataloader_type", _besides("single"), 'write "single"'),
    Flag("--data-parallel-random-init", "data_parallel_random_init", bool, LEAVE),
    Flag("--sft", "sft", bool, LEAVE),
    Flag("--dataloader-inter-document-masking", "dataloader_inter_document_masking", bool, LEAVE),
    Flag("--fim-data", "fim_data", bool, "leave it out: its samples depend on the order in which they are read"),
    Flag("--multiple-validation-sets", "multiple_validation_sets", bool, LEAVE),
    Flag("--full-validation", "full_validation", bool, "write --eval-iters"),
    Flag("--perform-rl-step", "perform_rl_step", bool, LEAVE),
    Flag("--inprocess-restart", "inprocess_restart", bool, LEAVE),
    Flag("--ckpt-convert-format", "ckpt_convert_format", bool, "convert without the plugin, which trains"),
    Flag("--async-save", "async_save", bool, LEAVE),
    Flag("--save-retain-interval", "save_retain_interval", bool, LEAVE),
    Flag("--verify-integrity", "verify_integrity", bool, LEAVE),
    Flag("--non-persistent-save-interval", "non_persistent_save_interval", bool, LEAVE),
    Flag("--log-num-zeros-in-grad", "log_num_zeros_in_grad", bool, LEAVE),
    Flag("--log-params-norm", "log_params_norm", bool, LEAVE),
    Flag("--log-energy", "log_energy", bool, LEAVE),
    Flag("--log-straggler", "log_straggler", bool, "leave it out: the plugin finds slow replicas by itself"),
    Flag("--log-progress", "log_progress", bool, "leave it out: recycle status RUN says how far the job is"),
    Flag("--log-max-attention-logit", "log_max_attention_logit", bool, LEAVE),
    Flag("--qk-clip", "qk_clip", bool, LEAVE),
    Flag("--save-params-interval", "save_params_interval", bool, LEAVE),
    Flag("--save-wgrads-interval", "save_wgrads_interval", bool, LEAVE),
    Flag("--save-dgrads-interval", "save_dgrads_interval", bool, LEAVE),
    Flag("--save-activations-interval", "save_activations_interval", bool, LEAVE),
    Flag("--check-weight-hash-across-dp-replicas-interval", "check_weight_hash_across_dp_replicas_interval", bool,
        "set recycle.check_replicas"),
    Flag("--exit-signal-handler-for-training", "exit_signal_handler_for_training", bool, "write --exit-signal-handler"),
    Flag("--adlr-autoresume", "adlr_autoresume", bool, LEAVE),
)  # fmt: skip


TOGETHER = {"num_distributed_optimizer_instances": 1, "overlap_param_gather": False, "overlap_grad_reduce": False}
"""Arguments as the plugin sets them: it overlaps nothing."""
WHOLE = {"use_distributed_optimizer": False}
"""Arguments with which every worker of a stage keeps the optimizer's whole state."""


def refusals(args: Namespace) -> Iterator[str]:
    """Yield a line for each unsupported flag in Megatron's parsed arguments."""
    for row in ROWS:
        value = getattr(args, row.name, None)
        if row.is_set(value):
            shown = "" if value is True else f" {value}"
            yield f"{row.flag}{shown} is not supported with recycle.enabled: {row.instead}"
    saved = [flag for flag in ("save", "load") if getattr(args, flag, None)]
    if getattr(args, "save", None) and getattr(args, "ckpt_format", "torch") not in ("torch", "torch_dist"):
        yield f"--ckpt-format {args.ckpt_format} is not supported with recycle.enabled: write --ckpt-format torch_dist"
    in_torch = getattr(args, "ckpt_format", None) == "torch"
    if saved and in_torch and getattr(args, "use_distributed_optimizer", False):
        yield (
            f"--use-distributed-optimizer with --{saved[0]} and --ckpt-format torch is not supported with "
            "recycle.enabled: write --ckpt-format torch_dist"
        )


def check(args: Namespace, settings: Settings) -> None:
    """Raise RecycleError for the first flag or setting that is not supported."""
    if (first := next(chain(refusals(args), of_settings(settings)), None)) is not None:
        raise RecycleError(first)


def of_settings(settings: Settings) -> Iterator[str]:
    """Yield a line for each setting that is not supported with Megatron-LM."""
    defaults = Settings()
    for name in ("log", "unit", "batch", "replicas", "checkpoint", "norm", "loss_scaling", "device_link"):
        if getattr(settings, name) != getattr(defaults, name):
            yield f"recycle.{name} is not supported with Megatron-LM yet: leave it out"


def prepare(args: Namespace, config: Any, session: Session) -> None:
    """Change flags for which the plugin has a way of its own, and report it once. ``config``: from Megatron-LM 0.19 on,
    the container already made from ``args``; else None.
    """
    said = []
    if args.use_distributed_optimizer:
        said.append(
            "--use-distributed-optimizer: each worker of a stage keeps the optimizer's state whole, since a lost "
            f"worker's part would be lost with it; that takes {args.data_parallel_size} times the memory of parts"
        )
    _set(TOGETHER, args, config)
    if getattr(args, "rerun_mode", "disabled") != "disabled":
        args.rerun_mode = "disabled"
        said.append("--rerun-mode disabled, since a step that is run again may be committed")
    if session.rank == 0:
        for text in said:
            session.note("zero" if text.startswith("--use-dist") else "warning", text)


def keep_whole(args: Namespace, config: Any, *more: Any) -> None:
    """Have each worker of a stage keep the optimizer's state whole, in optimizers built from now on."""
    _set(WHOLE, args, config, *more)


def _set(values: dict[str, Any], args: Namespace, config: Any, *more: Any) -> None:
    for each in (args, getattr(config, "ddp", None), getattr(config, "optimizer", None), *more):
        for name, value in values.items():
            if hasattr(each, name):
                setattr(each, name, value)


def single(optimizer: Any) -> Any:
    """Return the only member of a ChainedOptimizer, or the optimizer itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])[0]


def check_loaded(args: Namespace) -> None:
    """Raise RecycleError for a loaded checkpoint that does not tell where the data go on."""
    if args.iteration > 0 and args.consumed_train_samples == 0 and args.train_samples is not None:
        raise RecycleError(
            f"the checkpoint of step {args.iteration} in {args.load} does not count its samples, so that "
            "--train-samples can't go on from it: write --train-iters, with which each of its steps had "
            "--global-batch-size samples"
        )


def check_built(model: list[Any], optimizer: Any) -> Any:
    """Return the one optimizer that Megatron has built. Raises RecycleError for an unsupported model or optimizer."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model
    from torch.optim import Optimizer

    layers = unwrap_model(model)[0]
    if len(model) != 1 or not isinstance(layers, GPTModel) or type(model[0]) is not DistributedDataParallel:
        raise RecycleError(
            f"the model is {len(model)} x {type(layers).__name__} in {type(model[0]).__name__}: a GPTModel in "
            "DistributedDataParallel is supported"
        )
    found = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(found) != 1 or not isinstance(getattr(found[0], "optimizer", None), Optimizer):
        raise RecycleError(
            f"the optimizer is {len(found)} x {type(found[0]).__name__}: one over torch's Adam, AdamW or SGD, or "
            "their fused forms, is supported"
        )
    return found[0]
