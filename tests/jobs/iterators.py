"""A user's own script with plain iterators; counts by the weights how often each sample was used (as count.py does).

Sample n of replica r's iterator is the number r × EACH + n, its label a function of it that the loss checks.  The
iterators, of both ends of a replica, are generators: they can't be read again.  RECYCLE_TEST_ITERATORS: {"folder",
"faults", "steps", "replicas", "stages", "case", "held", "epoch", "each", "saved", "loaded", "resume"}; each rank writes
its rows, losses and how many batches it has read.  Before step ``held`` members wait for a file ``go`` in the folder;
``late``: who comes back does not begin before they do.
In the case "epochs" there is another iterator for each ``epoch`` steps, of samples of its own; in "returned" it is the
loader that
``initialize`` returns, of EACH samples of all replicas; with ``lengths``, of so
many samples of each replica, another one whenever ``train_batch`` raises StopIteration.
With a ``seed`` it is a loader with states, whose order is by that, and by another one in who comes back.
``saved``: a folder for a checkpoint of the last step; ``loaded``: one to go on from, with ``resume_iterators`` as
``resume`` says.  ``recycle``: more settings.  RECYCLE_TEST_WRAP: as for gpt.py, those of wrappers/.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import deepspeed
import endings
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.utils import RepeatingLoader
from stateful import stateful
from wrappers import apply, inside

MICRO_BATCHES, SIZE = 2, 2
apply()
job = json.loads(os.environ["RECYCLE_TEST_ITERATORS"])
folder = Path(job["folder"])
EACH = job.get("each") or 2 * MICRO_BATCHES * SIZE * job["steps"] * job["replicas"]


def label(ids: torch.Tensor) -> torch.Tensor:
    return 7 * ids + 3


class Rows(torch.nn.Module):
    """Adds this stage's row of each sample to what the earlier stages have summed: (ids, sums) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(EACH * max(job["replicas"], 3 if job.get("each") else 0), 1)
        torch.nn.init.zeros_(self.rows.weight)

    def forward(self, given):
        ids, sums = given if isinstance(given, tuple) else (given, 0.0)
        return ids, sums + self.rows(ids).squeeze(-1)


def loss(outputs, labels) -> torch.Tensor:
    ids, sums = outputs
    if not torch.equal(labels, label(ids)):
        raise AssertionError(f"inputs {ids.tolist()} meet labels {labels.tolist()}")
    return sums.sum()


class Samples(torch.utils.data.Dataset):
    """A replica's, ``length`` of them, from the one with the number ``begins`` on."""

    def __init__(self, replica: int, length: int, begins: int = 0) -> None:
        self.first, self.length = replica * EACH + begins, length - begins

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        ids = torch.tensor(self.first + index)
        return ids, label(ids)


reads = 0


def iterator(replica: int, begins: int = 0):
    again = int(os.environ.get("RECYCLE_INCARNATION", "0")) > 0
    if "seed" in job:
        return stateful(Samples(replica, EACH), SIZE, job["seed"] + again)
    if job.get("lengths"):
        return counted(
            iter(torch.utils.data.DataLoader(Samples(replica, begins + job["lengths"][replica], begins), SIZE))
        )
    length = {"short": 5, "short again": 8 if again else EACH, "not a multiple": 4 * SIZE + 1}.get(job["case"], EACH)
    loader = torch.utils.data.DataLoader(Samples(replica, length, begins), batch_size=SIZE)
    return RepeatingLoader(loader) if job["case"] in ("repeating", "not a multiple") else counted(iter(loader))


def counted(batches):
    global reads
    for ids, labels in batches:
        reads += 1
        yield {"text": ids, "labels": labels} if job["case"] == "batch_fn" else (ids, labels)


if job.get("late") and int(os.environ.get("RECYCLE_INCARNATION", "0")) > 0:
    endings.wait_for(folder / "held")
deepspeed.init_distributed()
model = PipelineModule(
    [LayerSpec(Rows) for _ in range(job["stages"])],
    topology=PipeDataParallelTopology(job["stages"], job["replicas"]),
    loss_fn=loss,
)
config = {
    "train_micro_batch_size_per_gpu": SIZE,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "steps_per_print": 10**9,
    "recycle": {
        "enabled": True,
        "run_dir": job["folder"],
        "report": False,
        "faults": job["faults"],
        "exact": job["case"] == "exact",
        "resume_iterators": job.get("resume", False),
        **job.get("recycle", {}),
    },
}
if job["case"] == "validate":  # half of the norm of a step's gradient, which is the same for all
    config["gradient_clipping"] = (
        0.5 * (SIZE * MICRO_BATCHES * job["replicas"] * job["stages"]) ** 0.5 / (MICRO_BATCHES * job["replicas"])
    )
    config["recycle"]["clip"] = "validate"
data = Samples(0, EACH) if job["case"] in ("set_dataloader", "returned") else None
engine, _, returned, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=data
)
replica = engine.grid.get_data_parallel_rank()
if job["case"] == "data_source":
    samples = [Samples(r, EACH) for r in range(job["replicas"])]

    def source(step: int, of: int, micro_batch: int):
        first = ((step - 1) * MICRO_BATCHES + micro_batch) * SIZE
        return torch.utils.data.default_collate([samples[of][first + n] for n in range(SIZE)])

    engine.set_data_source(source)
if job["case"] == "batch_fn":
    engine.set_batch_fn(lambda batch: (batch["text"], batch["labels"]))
ends = engine.is_first_stage() or engine.is_last_stage()
batches = iterator(replica) if ends and job["case"] != "no data" else None
if job["case"] == "set_dataloader":  # as in DeepSpeed it stands above training_data
    engine.set_dataloader(batches if ends else [])
    batches = None
if job["case"] == "returned":
    batches = returned
if job["case"] == "loader":
    batches = torch.utils.data.DataLoader(Samples(replica, EACH))
losses, ended = [], []
if job.get("loaded"):
    engine.load_checkpoint(job["loaded"])
begun = engine.global_steps
for step in range(begun + 1, job["steps"] + 1):
    if step == job.get("held") and not engine.behind:
        (folder / "held").touch()
        endings.wait_for(folder / "go")
    if job["case"] == "epochs" and step > 1 and step % job["epoch"] == 1 and ends:
        batches = iterator(replica, (step - 1) * EACH // job["steps"])
    if (job["case"], step) == ("another batch size", 4):
        engine.set_train_batch_size(2 * engine.train_batch_size())
    while len(losses) + begun < step:
        try:
            losses.append(engine.train_batch(data_iter=batches).item())
        except StopIteration:
            if not job.get("lengths"):
                raise
            ended.append(step)
            batches = iterator(replica, len(ended) * EACH // 4) if ends else None
    if (job["case"], step) == ("leaving", 3):
        session = inside().session
        session.waiting.until("the announcement of the leave", lambda: session.view.pending)
if job.get("saved"):
    engine.save_checkpoint(job["saved"])
(rows,) = engine.module.state_dict().values()
record = {"rows": rows.flatten(), "losses": losses, "reads": reads, "ended": ended}
endings.write(folder / "rows" / f"rank{os.environ['RANK']}.pt", lambda path: torch.save(record, path))
