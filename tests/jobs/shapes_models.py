"""The models and data of tests/jobs/shapes.py, for the test's own uncut run of them too."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

REPLICAS, STAGES, MICRO_BATCHES, SIZE, STEPS, WIDTH, WORDS = 2, 2, 2, 2, 6, 8, 11
LENGTHS = (4, 4, 6, 3, 3, 5)  # of the texts of each step
A_STEP = REPLICAS * MICRO_BATCHES * SIZE


class Texts(torch.utils.data.Dataset):
    """Dictionaries; the texts of a step have its length."""

    def __len__(self) -> int:
        return A_STEP * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = LENGTHS[index // A_STEP]
        ids = torch.randint(WORDS, (length + 1,), generator=torch.Generator().manual_seed(index))
        return {"ids": ids[:-1], "mask": ids[:-1] % 3 == 0, "labels": ids[1:]}


class Vectors(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return A_STEP * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return torch.randn(5, WIDTH, generator=made), torch.randn(5, WIDTH, generator=made)


class Words(nn.Module):
    """(ids, mask) to (mask, hidden, ids, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, given):
        ids, mask = given
        return mask, self.words(ids), ids, torch.zeros(())


class Masked(nn.Module):
    """Adds to the sum that travels along; ``often`` is left out where texts are of odd length."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.often = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        mask, hidden, ids, total = given
        hidden = (
            hidden
            + torch.tanh(self.always(hidden)).masked_fill(mask.unsqueeze(-1), 0.0)
            + 0.1 * ids.unsqueeze(-1).to(hidden.dtype)
        )
        hidden = self.often(hidden) if ids.size(1) % 2 == 0 else hidden
        return mask, hidden, ids, total + 0.01 * hidden.pow(2).mean()


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, given):
        return self.words(given[1]), given[3]


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)

    def forward(self, given):
        return given + F.dropout(self.norm(self.conv(given.transpose(1, 2))).transpose(1, 2), 0.2, self.training)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, given):
        return given + self.lstm(given)[0]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, given):
        return self.inner(given)


class Slope(nn.Module):
    """Differentiates an energy in its forward, and that gradient once more in the backward; has a hook on a weight that
    is used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def forward(self, given):
        with torch.enable_grad():  # checkpointing runs forwards without
            place = given if given.requires_grad else given.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.energy(place)).pow(2).sum(), place, create_graph=True)
        return slope + self.both(given) + F.linear(given, self.both.weight.t())


def model_layers(case: str) -> list[tuple]:
    if case == "tuples":
        return [(Words,), (Masked,), (Masked,), (Masked,), (Scores,)]
    if case == "frozen":
        return [(Frozen,), (nn.Tanh,), (Head,), (nn.Tanh,)]
    return [(Frozen,), (nn.ReLU, True), (Convolution,), (Convolution,), (nn.Tanh,), (Recurrent,), (Slope,), (Head,)]


def text_loss(outputs, labels) -> torch.Tensor:
    scores, total = outputs
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten()) + total


def loss_of(case: str):
    return text_loss if case == "tuples" else F.mse_loss


def groups(module: nn.Module) -> list[dict]:
    """Biases: without weight decay, and with a learning rate of their own."""
    biases = [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.03}]
