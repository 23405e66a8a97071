"""Scripts as people write them, run by a job, and then once more from the top by a worker that comes back.

RECYCLE_TEST_TOP holds as JSON: ``pattern``, one of the functions below; ``folder``: of the job, which waits at its end
for a file ``go`` there, if it ``waits``; ``out``: a folder for what each rank saw; ``load``: a folder of a checkpoint,
or ""; ``config``: what is otherwise in DeepSpeed's; ``tied``: whether first and last layer share a weight; ``steps``,
``epochs``: how many; ``held``: the step before which members wait for a file ``go``, or 0; ``drawn``: what rank 0
draws, 0 for chance; the process that comes back draws something else; ``source``: data comes by its address, whatever
the iterator; ``does``: what :func:`between` does between steps; ``dies_giving``: the rank whose first process is killed
when it is to hand over what is its script's, or -1.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import endings
import numpy as np
import torch
import torch.distributed as dist
from odd_optimizers import Wrapper
from samples import Samples

from recycle_plugin.core.messages.from_workers import ALWAYS
from recycle_plugin.runtime.control.boards import BoardAccess

WIDTH, REPLICAS = 8, 2
job = json.loads(os.environ["RECYCLE_TEST_TOP"])
STEPS, EPOCHS, INCARNATION = job["steps"], job["epochs"], int(os.environ.get("RECYCLE_INCARNATION", "0"))
RANK, FOLDER = int(os.environ["RANK"]), Path(job["folder"])
RECYCLE = {"enabled": True, "run_dir": str(FOLDER), "report": False}
seen: dict[str, Any] = {"rank": RANK, "pid": os.getpid(), "losses": [], "environment": dict(os.environ)}


def write_what_is_posted() -> None:
    """Also write what is for newcomers to a file, for newcomers under another coordinator."""
    post = BoardAccess.post

    def written(self: BoardAccess, board: str, value: bytes, generation: int) -> None:
        if generation == ALWAYS:
            (FOLDER / f"posted{RANK}").write_bytes(value)
        post(self, board, value, generation)

    BoardAccess.post = written  # type: ignore[method-assign]


def engine(dataset: Any = None) -> Any:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.init_distributed()
    if job["drawn"] and job["pattern"] != "seeds":
        torch.manual_seed(job["drawn"])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 6, "warmup_type": "linear"},
        },
        "recycle": RECYCLE | job["config"].pop("recycle", {}),
        **job["config"],
    }
    end = LayerSpec(torch.nn.Linear, WIDTH, WIDTH)
    if job["tied"]:
        end = TiedLayerSpec("tied", Frozen if "frozen" in job["does"] else torch.nn.Linear, WIDTH, WIDTH)
    layers = [end, LayerSpec(torch.nn.Tanh), LayerSpec(torch.nn.Linear, WIDTH, WIDTH), end]
    if job["does"]:
        del config["scheduler"]
    if "wrapped" in job["does"]:
        del config["optimizer"]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    made, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        training_data=dataset,
        optimizer=None if "optimizer" in config else lambda parameters: Wrapper(torch.optim.Adam(parameters, lr=0.01)),
    )
    if "bf16" in config:
        made.set_batch_fn(lambda batch: tuple(each.bfloat16() for each in batch))
    return made


class Frozen(torch.nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.requires_grad_(False)


def batches(number: int) -> Iterator[Any]:
    """Of one epoch; says how many were read of all."""
    for index in range(1_000):
        seen["read"] = seen.get("read", 0) + 1
        made = torch.Generator().manual_seed((1_000 * number + index) % (1 << 63))
        yield torch.randn(1, WIDTH, generator=made), torch.randn(1, WIDTH, generator=made)


def draw() -> int:
    return job["drawn"] + INCARNATION if job["drawn"] else secrets.randbelow(1 << 30)


def train(trained: Any, data_iter: Any = None) -> None:
    """A step, before which members may have to wait for the test."""
    if len(seen["losses"]) + 1 == job["held"] and not trained.behind:
        endings.wait_for(FOLDER / "go")
    seen["losses"].append(trained.train_batch(data_iter=data_iter).item())


def readme() -> None:
    trained = engine(Samples(WIDTH))
    for _ in range(STEPS):
        train(trained)
    if not trained.behind:
        seen["weights"] = weights(trained)


def weights(trained: Any) -> dict[str, list[float]]:
    return {name: value.detach().flatten().tolist() for name, value in trained.module.named_parameters()}


def epochs() -> None:
    """A loop over epochs, each with an iterator, an evaluation and a checkpoint; with an average of weights."""
    trained = engine()
    averages = {name: value.detach().clone() for name, value in trained.module.named_parameters()}

    def joined(step: int, state: dict[str, torch.Tensor]) -> None:
        seen["joined"] = [step, sorted(state), trained.behind]
        averages.update(state)

    def given() -> dict[str, torch.Tensor]:
        if job["dies_giving"] == RANK and not INCARNATION:
            os.kill(os.getpid(), signal.SIGKILL)
        return averages

    trained.on_join(joined, given)
    if job["source"]:
        trained.set_data_source(lambda step, replica, micro_batch: tuple(next(batches(step))))
    seen["names"] = sorted(averages)
    seen["evaluated"] = [trained.eval_batch(batches(-1)).item()]
    trained.save_checkpoint(job["out"], tag=f"begin {RANK if trained.behind else ''}")
    for epoch in range(EPOCHS):
        data_iter = batches(epoch)
        for _ in range(STEPS // EPOCHS):
            train(trained, data_iter)
            if not trained.behind:
                for name, value in trained.module.named_parameters():
                    averages[name].lerp_(value.detach(), 0.1)
        seen["evaluated"].append(trained.eval_batch(batches(100)).item())
        seen["saved"] = trained.save_checkpoint(job["out"], tag=f"{'newcomer' if trained.behind else 'epoch'}{epoch}")
    if not trained.behind:
        seen["weights"] = weights(trained)
        seen["averages"] = {name: value.flatten().tolist() for name, value in averages.items()}


def between() -> None:
    """What scripts do between steps, before members and newcomers train the next one: ``does``."""
    trained, does = engine(), job["does"]
    dtype = next(trained.module.parameters()).dtype
    averages = {name: value.detach().clone() for name, value in trained.module.named_parameters()}
    if "averages" in does:
        trained.on_join(lambda step, state: averages.update(state), lambda: averages)
    trained.set_data_source(lambda *place: tuple(each.to(dtype) for each in next(batches(hash(place)))))
    for step in range(STEPS):
        rate = 0.02 / (1 + step % 5)
        for group in trained.optimizer.param_groups if {"rates", "numpy"} & {*does.split("+")} else ():
            group["lr"] = np.float64(rate) if "numpy" in does else rate
            group["betas"] = 0.9 - 0.1 * (step % 3), 0.99
        with torch.no_grad():
            for number, parameter in enumerate(trained.module.parameters() if "clamped" in does else ()):
                (parameter.data if number % 2 else parameter).mul_(0.999).clamp_(-0.2, 0.2)
        if "zero_grad" in does:
            trained.module.zero_grad()
            trained.optimizer.zero_grad()
        train(trained)
        if "averages" in does and not trained.behind:
            for name, value in trained.module.named_parameters():
                averages[name].lerp_(value.detach(), 0.1)
    seen["weights"] = weights(trained)
    if "averages" in does:
        seen["averages"] = {name: value.flatten().tolist() for name, value in averages.items()}


def seeds() -> None:
    """Rank 0 draws a seed for all; each rank says what it has drawn, and hears the largest of some number."""
    import deepspeed

    deepspeed.init_distributed()
    drawn = [draw() if RANK == 0 else None]
    dist.broadcast_object_list(drawn, 0)
    torch.manual_seed(drawn[0])
    trained = engine()
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, secrets.token_hex(4))
    later = torch.tensor([float(secrets.randbelow(1 << 20))])
    deepspeed.comm.all_reduce(later, deepspeed.comm.ReduceOp.MAX)
    dist.barrier()
    deepspeed.comm.barrier()
    seen.update(seed=drawn[0], drawn=torch.rand(3).tolist(), everybodys=everybodys, later=later.item())
    trained.set_data_source(lambda step, replica, micro_batch: tuple(next(batches(drawn[0] + step))))
    for _ in range(STEPS):
        train(trained)
    if not trained.behind:
        seen["weights"] = weights(trained)


def global_steps() -> None:
    """Goes on from a checkpoint, where there is one, and counts by the engine's own numbers."""
    trained = engine(Samples(WIDTH))
    if job["load"]:
        path, client = trained.load_checkpoint(job["load"])
        seen["loaded"] = [path, client["epoch"], trained.global_steps, trained.global_samples, trained.get_lr()]
    seen["counts"] = []
    while trained.global_steps < STEPS + (STEPS // 2 if job["load"] else 0):
        train(trained)
        counts = [trained.global_steps, trained.global_samples, trained.skipped_steps, trained.micro_steps]
        seen["counts"].append([*counts, trained.get_lr(), trained.lr_scheduler.last_batch_iteration])
        if not job["load"] and trained.global_steps == STEPS // 2:
            trained.save_checkpoint(FOLDER / "checkpoint", client_state={"epoch": 3})
    if not trained.behind:
        seen["weights"] = weights(trained)


def skips() -> None:
    """Counts by the engine's own numbers, and leaves out what is over."""
    trained, seen["counts"] = engine(Samples(WIDTH)), []
    while trained.global_steps < STEPS:
        trained.skip_to_present()
        train(trained)
        seen["counts"].append([trained.global_steps, trained.global_samples, trained.micro_steps, trained.get_lr()])
    if not trained.behind:
        seen["weights"] = weights(trained)


def logs_a_mean() -> None:
    """Asks for a mean over all workers between steps, which nobody has kept."""
    import recycle_plugin

    trained = engine(Samples(WIDTH))
    for _ in range(STEPS):
        seen["losses"].append(trained.train_batch().item())
        dist.barrier(dist.new_group([RANK]))
        recycle_plugin.mean(torch.ones(1), None)


def catches_errors() -> None:
    """Logs a mean, and goes on with the next step whatever goes wrong."""
    import recycle_plugin

    trained = engine(Samples(WIDTH))
    for _ in range(STEPS):
        try:
            seen["losses"].append(trained.train_batch().item())
            recycle_plugin.mean(torch.ones(1), None)
        except Exception as error:
            print(f"a step is left out: {error}", flush=True)


def plain() -> None:
    """Without DeepSpeed: with a scheduler, evaluations, a checkpoint, and layers that one worker has drawn."""
    from recycle_plugin.adapters.plain import Pipeline

    dist.init_process_group()
    drawn = [secrets.randbelow(1 << 30)]
    dist.broadcast_object_list(drawn, 0)
    pipeline = Pipeline(
        layers=[lambda: torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh, lambda: torch.nn.Linear(WIDTH, WIDTH)],
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        data=lambda step, replica, micro_batch: next(batches(step)),
        stages=2,
        micro_batches=2,
        seed=drawn[0],
        settings={name: value for name, value in RECYCLE.items() if name != "enabled"},
    )
    pipeline.on_join(lambda step, state: None)
    if job["load"]:
        pipeline.load(job["load"])
    seen.update(seed=drawn[0], began=pipeline.steps, evaluated=[], rates=[])
    while pipeline.steps < STEPS + (2 if job["load"] else 0):
        seen["losses"].append(pipeline.step())
        seen["rates"].append(pipeline.scheduler.get_last_lr())
        if pipeline.steps % 3 == 0:
            seen["evaluated"].append(pipeline.evaluate(lambda replica, number: next(batches(100 + replica + number))))
            pipeline.save(Path(job["out"]) / "checkpoint" if pipeline.behind else FOLDER / "checkpoint")


def replicas() -> None:
    """A loop of the script's own, of a model that each worker has drawn for itself."""
    from recycle_plugin.adapters.plain import Replicas

    model = torch.nn.Linear(WIDTH, WIDTH)

    def compute(step: int, replica: int, micro_batch: int) -> torch.Tensor:
        seen["read"] = True
        inputs, labels = Samples(WIDTH)[4 * step + 2 * replica + micro_batch]
        loss = torch.nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        return loss

    settings = {name: value for name, value in RECYCLE.items() if name != "enabled"}
    trained = Replicas(model, torch.optim.SGD(model.parameters(), lr=0.1), compute, 2, settings=settings)
    for _ in range(STEPS):
        seen["losses"].append(trained.step())
        trained.save(Path(job["out"]) / "checkpoint" if trained.behind else FOLDER / "checkpoint")


write_what_is_posted()
patterns: list[Callable[[], None]] = [
    readme,
    epochs,
    between,
    seeds,
    global_steps,
    skips,
    logs_a_mean,
    catches_errors,
    plain,
    replicas,
]
{pattern.__name__: pattern for pattern in patterns}[job["pattern"]]()
endings.write(Path(job["out"]) / f"rank{RANK}.json", lambda path: path.write_text(json.dumps(seen)))
if job["waits"]:
    endings.wait_for(FOLDER / "go")
