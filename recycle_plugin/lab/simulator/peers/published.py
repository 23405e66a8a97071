"""Published and recomputed figures of other systems, as data. Never input to a cost model.
``published_recycle.json`` is digitised from the ReCycle authors' public slides and poster, +-0.02 samples/s.
"""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import groupby

DIGITISED = "digitised from the ReCycle authors' slides and poster (SOSP'24), +-0.02 samples/s"

GPUS = tuple(range(24, 14, -1))
FRACTIONS: dict[tuple[str, str], tuple[float, ...]] = {
    # (system, model), of that model's fault-free throughput, by GPUS
    ("fault-scaled", "big"): (1.000, 0.958, 0.917, 0.875, 0.833, 0.792, 0.750, 0.708, 0.667, 0.625),
    ("ReCycle", "big"): (1.000, 0.995, 0.960, 0.942, 0.923, 0.837, 0.821, 0.805, 0.785, 0.780),
    ("Oobleck", "big"): (1.000, 0.989, 0.928, 0.866, 0.835, 0.804, 0.773, 0.750, 0.719, 0.696),
    ("ReCycle", "350M"): (1.000, 0.996, 0.948, 0.936, 0.899, 0.837, 0.821, 0.804, 0.784, 0.779),
    ("Oobleck", "350M"): (1.000, 0.997, 0.933, 0.871, 0.840, 0.809, 0.778, 0.754, 0.723, 0.691),
    ("Bamboo", "350M"): (0.651, 0.620, 0.592, 0.574, 0.549, 0.523, 0.491, 0.457, 0.392, 0.350),
}
FAULT_FREE = {"big": 11.339, "350M": 20.43}
AVERAGES = {
    ("ReCycle", "big"): 10.80, ("fault-scaled", "big"): 10.27, ("Oobleck", "big"): 9.00,
    ("ReCycle", "350M"): 19.37, ("Oobleck", "350M"): 17.99, ("Bamboo", "350M"): 11.75,
}  # fmt: skip

_CHARTS = json.loads(files(__package__).joinpath("published_recycle.json").read_text())
_SAMPLED = [(abs(round(hour, 2)), round(gpus)) for hour, gpus in _CHARTS["gpus"]]
TRACE = tuple(next(same) for _, same in groupby(_SAMPLED, key=lambda sample: sample[1]))
"""Hour and GPUs of ReCycle's evaluation on GCP, at its beginning and at each change."""
TRACE_ENDS_H = 6.32

EXAMPLE = {
    "fault-free 1F1B": 27,
    "adaptive only": 36,
    "+ decoupled": 29,
    "+ staggered": 30,
}  # slots; the last: period with the optimizer

SWIFT_STORAGE = {  # SWIFT (PPoPP'23), 16 machines of 8 GPUs: bytes of the log, and seconds of a recovery
    "ViT-128/32": ((1.4e12, 126.0), (9e11, 147.5), (6e11, 156.0), (3e11, 171.7), (1e11, 198.6)),
    "BERT-128": ((5e11, 76.5), (1.5e11, 83.0), (8e10, 160.8), (5e10, 184.4)),
}
SWIFT_GAIN = 1.16  # of total training time over CheckFreq and Elastic Horovod, at most


def fraction(system: str, model: str, gpus: int) -> float | None:
    """Return the published throughput of ``system`` on ``gpus`` GPUs as a fraction of the fault-free one, or None."""
    row = FRACTIONS.get((system, model))
    return row[GPUS.index(gpus)] if row and gpus in GPUS else None


def curve(system: str, model: str) -> tuple[tuple[float, float], ...]:
    """Return the published curve of ``system`` over the trace as (hour, samples per second); empty if there is none."""
    return tuple(
        (hour, speed)
        for hour, speed in _CHARTS[{"350M": "gpt3_350m"}.get(model, model)].get(system.lower().replace("-", "_"), ())
    )
