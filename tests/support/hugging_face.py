"""Jobs of tests/jobs/hugging_face.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.jobs.hugging_face_model import FIRST_EVALUATED, Samples, model
from tests.support.cluster import ForkServer, Result
from tests.support.launching import cleaned, finished, here

SCRIPT, LOOP, RARER = (f"tests/jobs/{name}.py" for name in ("hugging_face", "accelerate_loop", "accelerate_rarer"))
RANKS = 4
JOB = {
    "replicas": 2,
    "stage": 1,
    "samples": 96,
    "evaluated": 29,
    "uneven": False,
    "dropout": 0.0,
    "arguments": {},
    "metrics": True,
    "kills": [],
    "held": [],
    "iterable": False,
    "resume": None,
    "own": False,
    "patience": 0,
    "threshold": 0.0,
    "epochs": 2,
    "longer": False,
    "odd": "",
    "tracked": False,
    "recycle": {},
}
Start = Callable[..., Result]


@contextmanager
def starting(server: ForkServer, folder: Path) -> Iterator[Start]:
    """``start(stage=3, kills=…)`` runs a job of the Trainer's, or of ``script``, and waits for the newcomers of one
    replica where members are held; at the end nothing of any of them may be left.
    """
    with cleaned() as runs:

        def start(ranks: int = RANKS, script: str = SCRIPT, **more: Any) -> Result:
            place = folder / f"run{len(runs)}"
            job = JOB | more | {"folder": str(place)}
            runs.append(here(server, place, ranks, script, [], RECYCLE_TEST_HUGGING_FACE=json.dumps(job)))
            return finished(runs[-1], job["held"], ranks // job["replicas"] if job["held"] else 0)

        yield start


PLAIN = {
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    "learning_rate": 0.5,
    "train_sampling_strategy": "sequential",
}
"""Arguments by which :func:`by_hand` can tell what comes out: gradients count as large as they are."""
BATCH, EVALUATED = 2, 3  # samples of a batch


def by_hand(
    live: Sequence[Sequence[int]], uneven: bool = False, logged: int = 0, samples: int = JOB["samples"]
) -> Trained:
    """What a job with the arguments PLAIN trains, of whose steps each is trained by neighbouring ranks (``live``): a
    loss is over all words of theirs.  ``logged``: the step behind which a replica is lost before it has
    given its loss, which is then the mean over the ranks that are left.
    """
    gpt, data, losses = model(), Samples(samples, uneven=uneven), []
    for step, ranks in enumerate(live):
        begin, end = (BATCH * (RANKS * step + rank) for rank in (ranks[0], ranks[-1] + 1))
        places = range(begin, end)
        words, labels = (torch.stack([data[place][name] for place in places]) for name in ("input_ids", "labels"))
        counted = (labels != -100).sum()  # as transformers counts them
        loss = gpt(input_ids=words, labels=labels, num_items_in_batch=counted).loss
        losses.append(loss.item())
        if step + 1 == logged:
            left = live[step + 1]
            kept = slice(BATCH * left[0], BATCH * (left[-1] + 1))
            part = gpt(input_ids=words[kept], labels=labels[kept], num_items_in_batch=counted).loss
            losses[-1] = part.item() * len(ranks) / len(left)  # each has its part times the number of ranks
        loss.backward()
        with torch.no_grad():
            for each in gpt.parameters():
                each -= PLAIN["learning_rate"] * (len(ranks) / RANKS) ** 0.5 * each.grad
                each.grad = None
    return Trained(losses, gpt)


class Trained(NamedTuple):
    """What a job has trained."""

    losses: list[float]
    model: torch.nn.Module

    @property
    def weights(self) -> dict[str, list[float]]:
        return {name: each.flatten().tolist() for name, each in self.model.named_parameters()}


def history(record: dict[str, Any], name: str = "loss") -> list[float]:
    return [line[name] for line in record["history"] if name in line]


def accuracy(gpt: torch.nn.Module, count: int = JOB["evaluated"], uneven: bool = False) -> float:
    """The share of words that ``gpt`` has right, of the samples that jobs are evaluated on."""
    rows = [*Samples(count, first=FIRST_EVALUATED, uneven=uneven)]
    words, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        found = gpt.eval()(input_ids=words).logits.argmax(-1)[:, :-1]
    counted = labels[:, 1:] != -100
    return float((found == labels[:, 1:])[counted].float().mean())


def evaluation_loss(gpt: torch.nn.Module, ranks: int, uneven: bool) -> float:
    """What stock's Trainer logs as ``eval_loss`` on that many ranks. A batch counts by its share of the labels that all
    ranks have in its round, so the number depends on how many they are.
    """
    data = [*Samples(JOB["evaluated"], first=FIRST_EVALUATED, uneven=uneven)]
    losses = list[float]()
    with torch.no_grad():
        for begin in range(0, len(data), ranks * EVALUATED):
            rows = [data[place % len(data)] for place in range(begin, begin + ranks * EVALUATED)]
            words, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
            counted = (labels != -100).sum()
            for own in torch.arange(len(rows)).split(EVALUATED):
                loss = gpt.eval()(input_ids=words[own], labels=labels[own], num_items_in_batch=counted).loss
                losses += [loss.item() * ranks] * EVALUATED
    return sum(losses[: len(data)]) / len(data)


def evaluated_once(record: dict[str, Any], count: int = JOB["evaluated"], in_order: bool = True) -> None:
    """Every evaluation, and the prediction, had each sample once; what is predicted stands in the data's order."""
    numbers = [*range(FIRST_EVALUATED, FIRST_EVALUATED + count)]
    assert (record["predicted"] if in_order else sorted(record["predicted"])) == numbers
    assert record["evaluated"] and all(each == numbers for each in record["evaluated"])
