"""What the public methods and properties of DeepSpeed's engine, and of its optimizer, give in a small job.

RECYCLE_TEST_SURFACE holds as JSON: ``folder``; ``config``, DeepSpeed's; ``steps``; ``replica``, for an engine of a
model without a pipeline.  Each rank writes folder/losses/rank<r>.json: ``surface``, what each name gives, as text;
``unknown``: names that need arguments of which nothing is said in CALLED or LEFT_OUT.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import endings
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

WIDTH = 8
job = json.loads(os.environ["RECYCLE_TEST_SURFACE"])
CALLED: dict[str, Callable[[Any], Any]] = {
    "set_batch_fn": lambda engine: engine.set_batch_fn(None),
    "set_dataiterator": lambda engine: engine.set_dataiterator(engine.data_iterator),
    "set_has_attention_mask": lambda engine: engine.set_has_attention_mask(False),
    "set_train_batch_size": lambda engine: engine.set_train_batch_size(engine.train_batch_size()),
    "set_train_micro_batch_size": lambda engine: engine.set_train_micro_batch_size(2),
    "set_data_post_process_func": lambda engine: engine.set_data_post_process_func(None),
    "set_gradient_accumulation_boundary": lambda engine: engine.set_gradient_accumulation_boundary(False),
    "is_map_style_dataset": lambda engine: engine.is_map_style_dataset([1]),
    "is_iterable_style_dataset": lambda engine: engine.is_iterable_style_dataset([1]),
    "random_ltd_initialize": lambda engine: engine.random_ltd_enabled(),
    "scale": lambda engine: engine.scale(torch.ones(1)),
    "backward": lambda engine: engine.backward(torch.ones(1)),
    "defaults": lambda optimizer: optimizer.defaults,
    "load_state_dict": lambda optimizer: optimizer.load_state_dict([optimizer.state_dict()]),
}
LEFT_OUT = {
    **dict.fromkeys(
        ("train_batch", "eval_batch", "save_checkpoint", "load_checkpoint", "step", "forward", "set_dataloader",
         "get_batch_info"),
        "what other tests are about",
    ),
    **dict.fromkeys(
        ("train", "eval", "zero_grad", "compile", "destroy", "dump_state", "empty_partition_cache",
         "collect_python_gc"),
        "changes the engine, or says much",
    ),
    **dict.fromkeys(
        ("all_gather_scalar", "allreduce_and_copy", "allreduce_bucket", "allreduce_gradients", "allreduce_no_retain",
         "buffered_allreduce_fallback", "clip_fp32_gradients", "sparse_all_gather", "sparse_allreduce",
         "sparse_allreduce_bucket", "sparse_allreduce_no_retain", "deepspeed_io", "log_for_device", "tput_log",
         "autotuning_start_profile_step", "autotuning_end_profile_step"),
        "stock code's own, of which it calls what it needs",
    ),
    **dict.fromkeys(
        ("module_state_dict", "load_module_state_dict", "load_moe_state_dict", "save_16bit_model", "save_fp16_model",
         "offload_states", "reload_states", "compile_autosp", "compile_autotp", "register_compile_pass",
         "set_custom_curriculum_learning_schedule", "update_optimizer_step", "get_deepcompile_backend",
         "get_autosp_backend", "get_optimizer_configuration", "print_forward_breakdown", "get_autotp_backend",
         "get_deepspeed_compile_backend"),
        "of what a config can't ask for beside the plugin",
    ),
    **dict.fromkeys(
        ("accumulate_hp_grads_and_remove_lp", "backward_epilogue", "backward_prologue", "clear_hp_grads",
         "clear_lp_grads", "configure_autoep_folding_tp_gradient_reduction", "create_grad_acc_hooks", "enter_backward",
         "exit_backward", "get_grads_for_norm", "get_grads_for_reduction",
         "load_hp_checkpoint_state_from_checkpoint_dir",
         "queue_post_backward_callback", "reenter_backward_if_needed", "register_grad_acc_post_hook",
         "report_ipg_memory_usage", "run_grad_acc_post_hooks", "scale_if_loss", "should_refresh_expected_hook_count",
         "unregister_grad_acc_post_hooks", "update_hook_state_and_maybe_run_epilogue", "update_hp_grads",
         "update_lp_params", "clear_backward_seen_flag", "refresh_fp32_params", "get_param_comm_dtype", "needs_scaler"),
        "of the optimizer's own backward: one line says so",
    ),
}  # fmt: skip
COUNTED = ("global_steps", "global_samples", "skipped_steps", "micro_steps", "micro_batches", "num_stages", "stage_id")


def public(kind: type) -> Iterator[str]:
    """The names of DeepSpeed's in a class."""
    for each in kind.__mro__:
        if each.__module__.startswith("deepspeed"):
            yield from (name for name in vars(each) if not name.startswith("_"))


def needs_nothing(member: Any) -> bool:
    parameters = [*inspect.signature(member).parameters.values()]
    return all(
        one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters[1:]
    )


def told(value: Any) -> str:
    if torch.is_tensor(value):
        return f"tensor {[round(each, 5) for each in value.detach().float().flatten().tolist()]}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{told(key)}: {told(one)}' for key, one in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {', '.join(map(told, value))}"
    if isinstance(value, float):
        return f"{value:.5g}"
    return nameless(repr(value))


def nameless(text: str) -> str:
    """Without what is another one in each process, or the plugin's."""
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace(type(engine).__name__, "Engine")


def asked(ask: Callable[[], Any]) -> str:
    try:
        return told(ask())
    except Exception as error:
        return nameless(f"{type(error).__name__}: {error}".partition("\n")[0])


def surface(thing: Any, kind: type) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in sorted({*public(kind)} - LEFT_OUT.keys()):
        member = inspect.getattr_static(kind, name)
        if name in CALLED:
            found[name] = asked(lambda: CALLED[name](thing))
        elif not isinstance(member, types.FunctionType):
            found[name] = asked(lambda: getattr(thing, name))
        elif needs_nothing(member):
            found[name] = asked(lambda: getattr(thing, name)())
        else:
            unknown.append(name)
    return found, unknown


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    kind = torch.bfloat16 if job["config"].get("bf16") else torch.float32
    return torch.randn(2, WIDTH, generator=made).to(kind), torch.randn(2, WIDTH, generator=made).to(kind)


def data(replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    count = 0
    while True:
        yield batch(1000 * replica + count)
        count += 1


def pipeline() -> Any:
    model = PipelineModule(
        [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(4)],
        topology=PipeDataParallelTopology(2, 2),
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job["config"])
    given: Any = data(engine.grid.data_parallel_id)
    if hasattr(engine, "set_data_source"):  # whoever reads it, the same batches
        engine.set_data_source(lambda step, replica, micro_batch: batch(1000 * replica + 2 * (step - 1) + micro_batch))
        given = None
    for _ in range(job["steps"]):
        engine.train_batch(given)
    return engine


def replica() -> Any:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job["config"])
    given = data(engine.global_rank)
    while engine.global_steps < job["steps"]:
        inputs, labels = next(given)
        engine.backward(torch.nn.functional.mse_loss(engine(inputs), labels))
        engine.step()
    return engine


deepspeed.init_distributed()
torch.manual_seed(7)
engine = replica() if job["replica"] else pipeline()
if hasattr(engine, "settle"):
    engine.settle()
stock = next(kind for kind in type(engine).__mro__ if kind.__module__.startswith("deepspeed"))
assert issubclass(stock, DeepSpeedEngine)
found, unknown = surface(engine, stock)
found |= {name: asked(lambda name=name: getattr(engine, name)) for name in COUNTED if hasattr(engine, name)}
found["tput_timer"] = asked(lambda: engine.tput_timer.global_step_count)
if job["config"].get("bf16"):
    of_optimizer, more = surface(engine.optimizer, BF16_Optimizer)
    found |= {f"optimizer.{name}": text for name, text in of_optimizer.items()}
    found["optimizer._global_grad_norm"] = asked(lambda: engine.optimizer._global_grad_norm)
    found["optimizer.defaults"] = asked(lambda: engine.optimizer.defaults)
    unknown += more
endings.leave(job["folder"], {"surface": found, "unknown": unknown})
