"""Which training data, and which checkpoints, the Megatron-LM adapter refuses before the first step; without a job."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from recycle_plugin.adapters.megatron_lm.refusals import check_loaded
from recycle_plugin.core.worker.data_cursor import DataCursor
from recycle_plugin.errors import RecycleError

pytest.importorskip("megatron.core")


class MegatronPretrainingSampler(SimpleNamespace):
    """As much of Megatron's sampler "single" as is asked for."""


class MegatronPretrainingRandomSampler(SimpleNamespace):
    """... of its sampler "cyclic"."""


def take(sampler: object, loader: tuple[str, ...] = ("_dataset",), **args: object) -> None:
    """Have a job train steps 3 to 7, of 8 samples each, with these data."""
    from recycle_plugin.adapters.megatron_lm.data import IndexedData

    given = {"iteration": 2, "train_iters": 7, "global_batch_size": 8, "train_samples": None, **args}
    behind = SimpleNamespace(_index_sampler=sampler, **dict.fromkeys(loader))
    IndexedData(lambda batch, training: batch, DataCursor(2), Namespace(**given)).take(SimpleNamespace(iterable=behind))


@pytest.mark.parametrize("consumed", (0, 16, 100))
@pytest.mark.parametrize("args, wanted", (({}, 40), ({"train_samples": 130}, 130)), ids=("steps", "samples"))
def test_data_are_refused_if_they_end_one_sample_before_the_last_step(consumed: int, args: dict, wanted: int) -> None:
    """``--train-samples`` counts from the beginning of the training, ``--train-iters`` what is left of it."""
    enough = wanted if args else consumed + wanted
    take(MegatronPretrainingSampler(total_samples=enough, consumed_samples=consumed), **args)
    with pytest.raises(RecycleError, match="steps 3 to 7 need") as refused:
        take(MegatronPretrainingSampler(total_samples=enough - 1, consumed_samples=consumed), **args)
    assert f"need {enough - consumed} samples, and the training data have {enough - 1 - consumed} of" in str(
        refused.value
    )


def test_data_that_peers_cannot_read_in_their_order_are_refused() -> None:
    enough = {"total_samples": 100, "consumed_samples": 0}
    take(MegatronPretrainingSampler(**enough))
    for sampler in (MegatronPretrainingRandomSampler(**enough), None):
        with pytest.raises(RecycleError, match="--dataloader-type single"):
            take(sampler)
    with pytest.raises(RecycleError, match="--dataloader-type single"):
        take(MegatronPretrainingSampler(**enough), loader=())


def test_a_number_of_samples_is_refused_for_a_checkpoint_that_counts_none() -> None:
    for iteration, consumed, wanted in ((3, 0, None), (3, 24, 80), (0, 0, 80)):
        check_loaded(
            Namespace(iteration=iteration, consumed_train_samples=consumed, train_samples=wanted, load="a folder")
        )
    with pytest.raises(RecycleError, match="the checkpoint of step 3 in a folder .* write --train-iters"):
        check_loaded(Namespace(iteration=3, consumed_train_samples=0, train_samples=80, load="a folder"))
