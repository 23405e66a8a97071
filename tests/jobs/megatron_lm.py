"""A GPT that Megatron-LM trains, by the flags of its own command line: ``megatron_lm.py FOLDER FLAGS…``.

Each rank leaves in FOLDER its losses, norms, weights, processor times and the samples that it has trained, by step.
RECYCLE_TEST_SAMPLES: how many the training data have, where not as many as are asked for.  RECYCLE_TEST_UNCOUNTED:
set if checkpoints don't say how many samples were trained, as those of old releases.  RECYCLE_PRETRAIN: the path of a
real pretrain_gpt.py, which runs in the place of the script here.  RECYCLE_TEST_WRAP: as for gpt.py, those of wrappers/.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import time
import types
from argparse import Namespace
from pathlib import Path

import torch

from recycle_plugin.patches import megatron_lm_cpu
from tests.support.megatron_lm import on_python_3_11

on_python_3_11()
if megatron_lm_cpu.wanted():  # stock jobs need it as well
    megatron_lm_cpu.apply()

from megatron.training import checkpointing, training  # noqa: E402

if json.loads(
    os.environ.get("RECYCLE_TEST_WRAP", "[]")
):  # few jobs ask for one, and those have the folder on their path
    import wrappers

    wrappers.apply()


class SummaryWriter:
    """In the place of TensorBoard's, which need not be installed: a line for each scalar, in a file of this process."""

    def __init__(self, log_dir: str, max_queue: int = 0) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self._file = (Path(log_dir) / f"{os.getpid()}.jsonl").open("w")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        print(json.dumps([tag, float(value), step]), file=self._file, flush=True)

    def __getattr__(self, name: str):
        return lambda *_, **__: None


sys.modules["torch.utils.tensorboard"] = types.ModuleType("torch.utils.tensorboard")
sys.modules["torch.utils.tensorboard"].SummaryWriter = SummaryWriter


class Wandb(types.ModuleType):
    """In the place of Weights & Biases' module, as above; ``config``: of the run, whose number comes by a variable."""

    def init(self, dir: str, **more: object) -> None:
        self._writer, self.config = SummaryWriter(f"{dir}/{os.environ['WANDB_RUN_ID']}"), dict(more)
        self.run, self.entity, self.project = self, "someone", more["project"]

    def log(self, values: dict, step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def Artifact(self, name: str, type: str, metadata: dict) -> types.SimpleNamespace:
        return types.SimpleNamespace(add_reference=self._refer, add_file=self._refer, step=metadata["iteration"])

    def _refer(self, path: str, checksum: bool = True) -> None:
        assert Path(path.removeprefix("file://")).exists(), path

    def log_artifact(self, artifact: types.SimpleNamespace, aliases: list[str]) -> None:
        self._writer.add_scalar(*aliases, os.getpid(), artifact.step)

    def finish(self) -> None:
        self._writer.add_scalar("finished", os.getpid(), 0)


sys.modules["wandb"] = Wandb("wandb")

LOGS_MORE = bool(os.environ.get("RECYCLE_TEST_LOGS_MORE"))
folder, kept = Path(sys.argv.pop(1)), {"losses": [], "logged": [], "norms": [], "cpu_s": [], "pid": os.getpid()}
trained: list[list[int]] = []
stock = training.train_step


def train_step(forward_step_func, data_iterator, model, *rest, **named):
    trained.append([])
    result = stock(forward_step_func, data_iterator, model, *rest, **named)
    kept["losses"] += [float(value) for name, value in result[0].items() if name == "lm loss"]
    kept["logged"] += [{name: float(value) for name, value in result[0].items()}] if result[0] else []
    kept["cpu_s"].append(time.process_time())
    kept["norms"].append(None if result[5] is None else float(result[5]))
    kept["backend"], kept["skipped"] = torch.distributed.get_backend(), result[1]
    return result


training.train_step = train_step


class Numbered(torch.utils.data.Dataset):
    """The first ``count`` samples of a dataset, each with its number."""

    def __init__(self, of: torch.utils.data.Dataset, count: int) -> None:
        self.of, self.count = of, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict:
        return {**self.of[place], "number": torch.tensor(place)}


def provide(sizes, vp_stage=None):
    """Megatron's mock data, on the stages that read any."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="969,30,1",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    reads = lambda: is_first_or_last_pipeline_stage(vp_stage)
    train, *others = BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, reads, config).build()
    if train is not None:
        train = Numbered(train, int(os.environ.get("RECYCLE_TEST_SAMPLES", len(train))))
    return train, *others


provide.is_distributed = True


def forward_step(data_iterator, model):
    """As Megatron's own: the sum of the losses of tokens, their number, and what is logged."""
    from megatron.training.utils import is_first_or_last_pipeline_stage

    names = "tokens", "position_ids", "attention_mask", "labels", "loss_mask"
    reads = is_first_or_last_pipeline_stage(None)
    batch = next(data_iterator) if reads else dict.fromkeys(names)
    if reads and model.training:
        trained[-1] += batch["number"].tolist()

    def loss(output):
        mask = batch["loss_mask"].view(-1).float()
        if LOGS_MORE:  # and micro-batches have different numbers of tokens
            mask[: int(batch["tokens"][0, 0]) % 8] = 0
        total = torch.sum(output.view(-1).float() * mask)
        tokens = mask.sum().to(torch.int)
        of_tokens = torch.cat([total.detach().view(1), tokens.view(1)])
        more = {"plain": output.detach().max(), "pair": of_tokens**2} if LOGS_MORE else {}
        return total, tokens, more | {"lm loss": of_tokens}

    return model(*(batch[name] for name in names[:3]), labels=batch["labels"]), loss


def main():
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provide, ModelType.encoder_or_decoder, forward_step)


def leave(models):
    """Leave what came of it; where the plugin trains, reading weights waits for the last commit."""
    folder.mkdir(parents=True, exist_ok=True)
    kept["samples"] = trained
    kept["weights"] = {name: one.detach().clone() for name, one in models[0].module.named_parameters()}
    torch.save(kept, folder / f"rank{torch.distributed.get_rank()}.pt")
    for helper in multiprocessing.active_children():  # of Megatron's own saving, which it leaves to the interpreter
        helper.terminate()
        helper.join()


optimizer_of = training.get_megatron_optimizer


def get_megatron_optimizer(*given, **named):
    """Stock's, whose distributed optimizer loads nothing over torch's Adam, which is all that a CPU has."""
    from recycle_plugin.adapters.megatron_lm.in_parts import mend_for_torchs

    made = optimizer_of(*given, **named)
    loads = "--load" in sys.argv and not {"--finetune", "--no-load-optim"} & {*sys.argv}
    for one in made.chained_optimizers if loads else ():
        if torch.distributed.get_backend() == "gloo" and hasattr(one, "shard_fp32_from_float16_groups"):
            mend_for_torchs(one)
    return made


training.get_megatron_optimizer = get_megatron_optimizer
made = checkpointing.generate_state_dict


def generate_state_dict(args, *given, **named):
    state = made(args, *given, **named)
    if os.environ.get("RECYCLE_TEST_UNCOUNTED"):
        state["args"] = Namespace(**vars(args) | {"consumed_train_samples": 0, "consumed_valid_samples": 0})
    return state


checkpointing.generate_state_dict = generate_state_dict
setup, built = training.setup_model_and_optimizer, []


def setup_model_and_optimizer(*given, **named):
    built.append(setup(*given, **named))
    for one in built[-1][1].chained_optimizers:
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()  # of stock's distributed optimizer all have the same, once loaded
    return built[-1]


training.setup_model_and_optimizer = setup_model_and_optimizer
if __name__ == "__main__":  # and not in a helper process of Megatron's
    try:
        if script := os.environ.get("RECYCLE_PRETRAIN"):
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
        else:
            main()
    except SystemExit as end:  # --exit-interval
        if end.code:
            raise
    leave(built[-1][0])
