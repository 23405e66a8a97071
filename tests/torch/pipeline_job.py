"""Run by test_stock_pipeline.py, two of it: what this package adds, inside DeepSpeed's own pipeline engine.

Prints one JSON line per rank: losses and a digest of the rank's parameters for each kind of run.
"""

import faulthandler
import hashlib
import json
import multiprocessing

import torch

from recycle_plugin.patches import deepspeed_cpu

faulthandler.dump_traceback_later(90, exit=True)
torch.set_num_threads(1)
import deepspeed  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from deepspeed.runtime.dataloader import RepeatingLoader  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

deepspeed_cpu.apply()
deepspeed.init_distributed("gloo")

from recycle_plugin.lab.training.emulated import EmulatedLayer  # noqa: E402
from recycle_plugin.lab.training.gpt import GPTShape, gpt_layers, gpt_loss  # noqa: E402
from recycle_plugin.lab.training.text import TextWindows  # noqa: E402
from recycle_plugin.runtime.stage.split_backward import DeferredWeights  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000,
}


def train(layers, loss, dataset, convert: bool = False, checkpoint: int = 0, steps: int = 3) -> dict:
    torch.manual_seed(0)
    net = PipelineModule(
        layers,
        num_stages=2,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=checkpoint,
        # DeepSpeed's checkpointing of an embedding loses its graph: ids have no gradient
        checkpointable_layers=["GPTBlock"],
    )
    if convert:
        DeferredWeights(net)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    # not its own, whose loader's processes take seconds to end
    batches = iter(RepeatingLoader(DataLoader(dataset, batch_size=CONFIG["train_micro_batch_size_per_gpu"])))
    losses = [float(engine.train_batch(batches)) for _ in range(steps)]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    return {"losses": losses, "digest": digest}


gpt = gpt_layers(GPTShape(2, 32, 4, 16))
text = TextWindows(None, 16, limit_bytes=10_000)
vectors = [(torch.ones(4), torch.zeros(4))] * 32
report = {
    "stock": train(gpt, gpt_loss, text),
    "converted": train(gpt, gpt_loss, text, convert=True),
    "stock, checkpointed": train(gpt, gpt_loss, text, checkpoint=1),
    "converted, checkpointed": train(gpt, gpt_loss, text, convert=True, checkpoint=1),
    "emulated": train([LayerSpec(EmulatedLayer, 4, 1e-3, 1e-3, 1e-3)] * 4, torch.nn.functional.mse_loss, vectors),
}
# one write: both ranks' output goes to one file
print(f"REPORT {json.dumps(report)}\n", end="", flush=True)
# of DeepSpeed's data loaders, whom the end of a forked process tells nothing
for loader in multiprocessing.active_children():
    loader.terminate()
    loader.join()
