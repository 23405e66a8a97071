"""The small GPT-2 of tests/jobs/hugging_face.py and tests/jobs/accelerate_loop.py, and its samples."""

from __future__ import annotations

import os

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, LENGTH = 128, 12
FIRST_EVALUATED = 20  # the number of the first sample that jobs are evaluated on
SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": WORDS}
DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


class Samples(torch.utils.data.Dataset):
    """Rows of words, each of which begins with its own number; ``uneven``: some words of each are not to be learnt."""

    def __init__(self, count: int, first: int = 0, uneven: bool = False) -> None:
        self.numbers, self._uneven = range(first, first + count), uneven

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        number = self.numbers[place]
        words = (number + (1 + number % 5) * torch.arange(LENGTH)) % WORDS
        labels = words.clone()
        if self._uneven:
            labels[1 : 1 + number % (LENGTH - 2)] = -100
        return {"input_ids": words, "labels": labels}


def model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    drops = dict.fromkeys(DROPS, dropout)
    return GPT2LMHeadModel(GPT2Config(**SIZES, **drops, bos_token_id=None, eos_token_id=None))
