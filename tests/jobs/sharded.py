"""A small job of sharded replicas, in a script's own loop, or the same model with stock DeepSpeed.

RECYCLE_TEST_SHARDED holds as JSON: ``folder``: of the job; ``replicas``: 0 for stock DeepSpeed; ``stage``: of ZeRO;
``steps``; ``accumulation``; ``kind``: "fp32" or "bf16"; ``clip``; ``kills``: [rank, number, where] of each process that
kills itself: ``where`` is "forward" or "backward", in the middle of the micro-batch of that number, or "gather", in a
gather of ZeRO's behind its begin, or "step", in the optimizer's step behind so many; ``faults``: the plugin's;
``held``: the steps before which ranks wait for a file ``goSTEP`` in the folder; ``stops``: for ranks, after how many
micro-batches their loops end; ``ledger``: the samples of each step and rank, which are trained instead of those that a
rank would draw, or null; ``saves``: the steps after which a checkpoint is saved; ``exports``: those
after which all weights are, in one file; ``counts``: whether the loss of a micro-batch is over all tokens, times the
world size, as transformers has it; ``touches``: what the script makes of gradients between backward and step,
"clip", "drop", "noise", "halve" or "early", or ""; ``refuse``: whether the system then
refuses its files; ``load``: the folder of one that is begun with, or null; ``averages``: whether a sample is evaluated,
and that averaged over all ranks, after each step; ``meets``: whether the ranks meet before the first step; ``rates``:
who sets learning rates: DeepSpeed's scheduler of the "config", one of "functions" that are given to it, or the
"script", for each step, before it ("relative": by the last one's) or "behind" the last one (at stage 0 it clamps
weights there, too), or "masters", which decay there by the script, those of some multiplied by ``factors``;
``shrinks``: whether batches do; ``seldom``: whether each third micro-batch leaves a layer out; ``odd``: whether layers
have sizes that the ranks don't divide, and memory that nobody has written has other numbers on each rank; ``wrong``:
what is wrong in its loop; ``lag``: a rank, seconds and a step: the rank sleeps for so long in each forward up to that
step, or null; ``seed``: of the order in which a loader with states gives a rank's samples, another one in who comes
back, or null for no loader; ``recycle``: more settings; ``standin``: whether it trains on the stand-in accelerator
(tests/support/standin); ``config``: more of DeepSpeed's. What a rank has drawn is written down before its step.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import endings
import torch
import torch.distributed as dist
from deepspeed.utils.logging import set_log_level_from_string
from stateful import stateful
from torch import nn

import recycle_plugin
from recycle_plugin.errors import NotSaved

WIDTH = 8
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
SMALL = {"reduce_bucket_size": 500}  # stock's is of 2 GB, and the stand-in fills all that is allocated
job = json.loads(os.environ["RECYCLE_TEST_SHARDED"])
FOLDER, HIDDEN = Path(job["folder"]), 31 if job["odd"] else 24
INCARNATION = int(os.environ.get("RECYCLE_INCARNATION", "0"))


if job["standin"]:
    os.environ.pop("DS_ACCELERATOR", None)
    sys.path.append(str(Path(__file__).parents[2]))
    importlib.import_module("tests.support.standin.accelerator").use()


def unwritten(*arguments, empty=torch.empty, **named) -> torch.Tensor:
    made = empty(*arguments, **named)
    small = made.is_floating_point() and not made.is_meta and made.numel() < 10_000  # no buffer of stock's for sums
    return made.fill_(1.0 + RANK) if small else made


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(4, WIDTH, generator=generator)
    return x, torch.tanh(x.roll(1, 1)) + 0.1 * torch.randn(4, WIDTH, generator=generator)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = lambda: 0
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, WIDTH)))
        self.twin = self.layers[-1] if job["exports"] else None  # shares its weights

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        die("forward")
        if job["lag"] and job["lag"][0] == RANK and self.steps() < job["lag"][2]:
            time.sleep(job["lag"][1])
        for number, layer in enumerate(self.layers[:-1]):
            if number == 0 or not job["seldom"] or calls % 3:
                x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.layers[-1](Dying.apply(x)), y)


class Dying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        die("backward")
        return gradient


calls = 0
NOISE = torch.Generator().manual_seed(1000 * int(os.environ["RANK"]) + INCARNATION)  # another one on each rank


def die(where: str, number: int | None = None) -> None:
    if [RANK, calls if number is None else number, where] in job["kills"] and not INCARNATION:
        os.kill(os.getpid(), signal.SIGKILL)


def dying(gather):
    """torch.distributed's ``gather``, as ZeRO calls it."""

    def gather_or_die(*arguments, **named):
        die("gather")
        return gather(*arguments, **named)

    return gather_or_die


def config() -> dict:
    half = {"bf16": {"enabled": True}} if job["kind"] == "bf16" else {}
    recycle = {"enabled": False}
    if job["replicas"]:
        recycle = {"enabled": True, "unit": "replica", "replicas": job["replicas"], "run_dir": job["folder"]}
        recycle |= {"report": False, "check_replicas": 1, "faults": job["faults"]} | job["recycle"]
        recycle |= {"batch": "shrink"} if job["shrinks"] else {}
    rates = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}}
    return (
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job["accumulation"],
            "gradient_clipping": job["clip"],
            "zero_optimization": {"stage": job["stage"]} | (SMALL if job["standin"] else {}),
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10_000,
            "recycle": recycle,
        }
        | half
        | ({} if job["rates"] == "functions" else {"optimizer": OPTIMIZER})
        | ({"scheduler": rates} if job["rates"] == "config" else {})
        | job["config"]
    )


def functions() -> dict:
    """The optimizer and the scheduler, as a script may give them itself."""
    if job["rates"] != "functions":
        return {}
    return {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10)),
    }


def meet() -> list[float]:
    """What all ranks have agreed on before the first step."""
    drawn, summed = torch.rand(3), torch.tensor([1.0 + RANK])
    dist.broadcast(drawn, 0)
    dist.all_reduce(summed)
    dist.barrier()
    said = [float(INCARNATION)]
    dist.broadcast_object_list(said, 0)
    return [*drawn.tolist(), *summed.tolist(), *said]


def weights(engine) -> dict[str, list[float]]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=job["stage"] == 3):
            found[name] = parameter.detach().float().flatten().tolist()
    return found


def tokens_share() -> float:
    """By what a loss is multiplied that is a mean over a rank's own tokens, to be one over all."""
    mine = torch.tensor(32)
    total = mine.clone()
    dist.all_reduce(total)
    return mine.item() * dist.get_world_size() / total.item()


def touch(engine) -> float:
    """Do what the job is to do with the gradients of a step, whose norm is the value."""
    layers, whole = [*engine.module.parameters()], job["stage"] == 0
    found = [each.grad if whole else deepspeed.utils.safe_get_full_grad(each) for each in layers]
    norm = torch.stack([each.float().norm() for each in found]).norm().item()
    made = {
        "clip": lambda each: each * min(1.0, 0.05 / (norm + 1e-6)),
        "noise": lambda each: each + 1e-3 * torch.randn(each.shape, generator=NOISE),
        "halve": lambda each: each * 0.5,
    }.get(job["touches"])
    if job["touches"] == "clip" and whole:
        nn.utils.clip_grad_norm_(layers, 0.05)
    elif job["touches"] == "drop" and whole:
        layers[0].grad = None
    elif job["touches"] == "drop":
        deepspeed.utils.safe_set_full_grad(layers[0], torch.zeros_like(found[0]))
    elif job["touches"] == "halve" and job["stage"] == 3:
        for each in layers:
            deepspeed.utils.safe_set_local_grad(each, deepspeed.utils.safe_get_local_grad(each) * 0.5)
    elif made is not None and whole:
        for each in layers:
            each.grad = made(each.grad)
    elif made is not None:
        deepspeed.utils.safe_update_full_grad_vectorized(layers, lambda gradient, _: made(gradient))
    return norm


def mistake(engine, loss: torch.Tensor) -> None:
    """Do what the job is to do wrong, where a micro-batch has run forward."""
    inputs = sample(0)
    match job["wrong"]:
        case "twice":
            engine(*inputs)
        case "no backward":
            engine.step()
        case "no forward":
            engine.backward(loss)
            engine.backward(loss)
        case "no step":
            for _ in range(3):
                engine.backward(loss)
                loss = engine(*inputs)
        case "only step":
            engine.backward(loss)
            engine.step()
            engine.step()
        case "no_sync":
            engine.no_sync()
        case "save":
            engine.save_checkpoint(str(FOLDER / "saved"))


@contextmanager
def refusing() -> Iterator[None]:
    """A context in which the system refuses large files, and the script goes on without what it could not write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    except NotSaved:
        (FOLDER / f"refused{RANK}").touch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def set_rates(engine) -> None:
    step = engine.global_steps + 1
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2 / step * job["factors"].get(str(step), 1.0)


def loader(engine, loaded: int) -> tuple[Any, Iterator[torch.Tensor]]:
    """A loader of this rank's samples, as `recycle docs jobs` places it, and what it gives; ``loaded``: the step of the
    checkpoint that was loaded.
    """
    made = stateful(range(RANK, 10_000, dist.get_world_size()), 1, job["seed"] + RANK + 100 * INCARNATION)
    begun, kept = 0, Path(job["load"] or "", "data", f"{loaded}.{RANK}.pt")
    if loaded and kept.exists():
        made.load_state_dict(torch.load(kept, weights_only=True))
        begun = loaded * job["accumulation"]
    return made, itertools.islice(made, engine.data_cursor - begun, None)


def between_steps(engine, dtype: torch.dtype, draws: int, data: Any) -> None:
    """Do what the job is to do behind a step that was applied, with so many micro-batches drawn."""
    if job["rates"] == "behind":
        set_rates(engine)
        for parameter in engine.module.parameters() if job["stage"] == 0 else ():
            parameter.data.mul_(0.99).clamp_(-0.3, 0.3)
    if job["rates"] == "masters":
        shards = "fp32_partitioned_groups_flat" if job["stage"] == 3 else "single_partition_of_fp32_groups"
        for each in getattr(engine.optimizer, shards):
            each.data.mul_(0.9)
    if job["averages"]:
        engine.eval()
        with torch.no_grad():
            recycle_plugin.mean(engine(*(each.to(engine.device, dtype) for each in sample(0))), None)
        engine.train()
    if engine.global_steps in job["saves"] and data is not None:
        (FOLDER / "saved" / "data").mkdir(parents=True, exist_ok=True)
        torch.save(data.state_dict(), FOLDER / "saved" / "data" / f"{engine.global_steps}.{RANK}.pt")
    if engine.global_steps in job["saves"]:
        with refusing() if job["refuse"] else nullcontext():
            engine.save_checkpoint(str(FOLDER / "saved"), client_state={"drawn": draws, "step": engine.global_steps})
    if engine.global_steps in job["exports"]:
        export(engine)


def export(engine) -> None:
    """Save the weights by each way that stock leaves to rank 0."""
    said = engine.save_16bit_model(str(FOLDER / "exported"), f"{engine.global_steps}.bin")
    if job["stage"] == 3:
        weights = engine._zero3_consolidated_16bit_state_dict()
        if weights is not None:
            torch.save(weights, FOLDER / "exported" / f"consolidated{engine.global_steps}.{RANK}.bin")
    (FOLDER / "exported" / f"said{engine.global_steps}.{RANK}.{INCARNATION}").write_text(str(said))


def prepared() -> tuple[Any, list, int]:
    """The engine, what ranks have agreed on before its first step, and the step of the checkpoint that was loaded."""
    torch.manual_seed(5)
    if job["odd"]:
        torch.empty = unwritten
    if job["exports"]:
        set_log_level_from_string("info")  # where stock says how far it is
    dist.all_gather_into_tensor = dying(dist.all_gather_into_tensor)
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(), **functions())
    met = meet() if job["meets"] else []
    model.steps = lambda: engine.global_steps
    loaded = 0
    if job["load"]:
        path, state = engine.load_checkpoint(job["load"])
        assert path is not None and state["drawn"] > 0, path
        loaded = state["step"]
    engine.basic_optimizer.register_step_pre_hook(lambda *_: die("step", engine.global_steps))
    return engine, met, loaded


def main() -> None:
    engine, met, loaded = prepared()
    (FOLDER / "drawn").mkdir(exist_ok=True)
    drawn = (FOLDER / "drawn" / f"{RANK}.{INCARNATION}").open("w")
    world, first, given = dist.get_world_size(), engine.global_steps, job["ledger"]
    dtype = torch.bfloat16 if job["kind"] == "bf16" else torch.float32
    draws = cursor = engine.data_cursor if job["replicas"] else first * job["accumulation"]
    record: dict[str, Any] = {"incarnation": INCARNATION, "first": first, "cursor": cursor, "met": met}
    record |= {"losses": [], "norms": [], "used": {}, "surprises": 0, "rate": engine.optimizer.param_groups[0]["lr"]}
    of_step: list[int] = []
    global calls
    if job["rates"] == "behind" and not first:
        set_rates(engine)
    data, numbers = (None, iter(())) if job["seed"] is None else loader(engine, loaded)
    while engine.global_steps < job["steps"]:
        if engine.global_steps + 1 in job["held"] and not of_step:
            endings.wait_for(FOLDER / f"go{engine.global_steps + 1}")
        if calls == job["stops"].get(str(RANK)):
            return
        if data is not None:
            number, draws = int(next(numbers)), draws + 1
        elif given is None:
            number, draws = RANK + world * draws, draws + 1
        else:
            number = given[str(engine.global_steps + 1)][str(RANK)][len(of_step)]
        if job["rates"] == "script" and not of_step:
            set_rates(engine)
        if job["rates"] == "relative" and not of_step:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.9
        calls += 1
        before, share = engine.global_steps, tokens_share() if job["counts"] else 1.0
        loss = share * engine(*(each.to(engine.device, dtype) for each in sample(number)))
        if engine.global_steps > before:  # closed without this rank's work
            before = engine.global_steps
        mistake(engine, loss)
        drawn.write(f"{engine.global_steps + 1} {number}\n")
        drawn.flush()
        engine.backward(loss)  # behind the last one of a step a worker may die that has given all of it
        of_step.append(number)
        record["losses"].append(loss.item())
        boundary = engine.is_gradient_accumulation_boundary()
        if job["touches"] and (boundary or job["touches"] == "early"):
            record["norms"].append(touch(engine))
        engine.step()
        record["surprises"] += boundary != (engine.global_steps > before)
        if engine.global_steps > before:
            between_steps(engine, dtype, draws, data)
            record["used"][engine.global_steps], of_step = of_step, []
    endings.leave(FOLDER, record | {"weights": weights(engine), "steps": engine.global_steps})


RANK = int(os.environ["RANK"])
if __name__ == "__main__":
    main()
