"""The model and data of the scripts that call the engine as known codebases do."""

from __future__ import annotations

import os
from pathlib import Path

import endings
import torch

VOCABULARY, WIDTH = 64, 16


class Tokens(torch.utils.data.Dataset):
    """``length`` texts of ``size`` tokens that a simple rule makes, so that there is something to learn."""

    def __init__(self, length: int, size: int, vocabulary: int) -> None:
        first = torch.randint(vocabulary, (length, 1), generator=torch.Generator().manual_seed(1))
        self.texts = (first + torch.arange(size) * 3) % vocabulary

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict:
        return {"text": self.texts[index]}


class Embed(torch.nn.Module):
    """(tokens, positions, mask) to (hidden, mask): the mask travels with the activation, as a boolean tensor."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(length, WIDTH)

    def forward(self, given):
        tokens, positions, mask = given
        return self.words(tokens) + self.places(positions), mask

    @property
    def word_embeddings_weight(self) -> torch.nn.Parameter:
        return self.words.weight


def logits(embed: Embed, given) -> torch.Tensor:
    """The head whose weights are the embedding's."""
    return torch.nn.functional.linear(given[0], embed.word_embeddings_weight)


class Block(torch.nn.Module):
    """Attention over what the mask leaves, and a linear layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 3 * WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, given):
        hidden, mask = given
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).masked_fill(mask[0], -1e4)
        return hidden + torch.nn.functional.dropout(self.out(scores.softmax(-1) @ value), 0.1, self.training), mask


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, given):
        return self.words(given[0])


def masked_loss(outputs, labels) -> torch.Tensor:
    labels, mask = labels
    losses = torch.nn.functional.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def save(folder: str, engine, record: dict) -> None:
    whole = record | {"weights": dict(engine.module.state_dict())}
    endings.write(Path(folder) / "ends" / f"rank{os.environ['RANK']}.pt", lambda path: torch.save(whole, path))
