"""Published and recomputed figures of other systems, as data. Never input to a cost model.
``published_recycle.json`` is digitised from the ReCycle authors' public slides and poster, +-0.02 samples/s.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

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

TRACE = (  # hour and GPUs of ReCycle's evaluation on GCP
    (0, 24),
    (0.12, 23),
    (0.56, 22),
    (0.68, 23),
    (0.88, 24),
    (1.04, 22),
    (1.12, 21),
    (1.20, 22),
    (1.28, 21),
    (1.36, 22),
    (1.52, 24),
    (1.68, 23),
    (1.80, 20),
    (1.96, 22),
    (2.08, 24),
    (2.24, 23),
    (2.48, 24),
    (2.60, 23),
    (2.84, 22),
    (2.96, 24),
    (3.08, 23),
    (3.32, 22),
    (3.48, 24),
    (3.60, 21),
    (3.84, 22),
    (3.96, 23),
    (4.08, 21),
    (4.20, 19),
    (4.32, 17),
    (4.48, 16),
    (4.56, 15),
    (4.68, 16),
    (4.72, 18),
    (4.96, 21),
    (5.76, 20),
    (5.84, 21),
    (5.92, 22),
    (6.20, 24),
)
TRACE_ENDS_H = 6.32

EXAMPLE = {
    "fault-free 1F1B": 27,
    "adaptive only": 36,
    "+ decoupled": 29,
    "+ staggered": 30,
}  # slots; the last: period with the optimizer

# Oobleck's public artifact: measured on A40 nodes; its pauses are its simulator's, per event.
OOBLECK_BATCH = {"GPT-3 medium": 819, "GPT-3 2.7B": 512, "GPT-3 6.7B": 1024}
OOBLECK_PAUSE_S = {"GPT-3 medium": 3.0, "GPT-3 2.7B": 6.0, "GPT-3 6.7B": 10.0}
OOBLECK_MEASURED = {  # samples per second on 30, 29, ... nodes; 6.7B on 15 is infeasible
    "GPT-3 medium": (
        38.47,
        37.19,
        35.90,
        34.62,
        33.34,
        31.67,
        30.24,
        28.96,
        27.77,
        26.68,
        25.69,
        23.83,
        23.03,
        21.58,
        20.87,
        19.10,
    ),
    "GPT-3 2.7B": (
        9.214,
        8.907,
        8.600,
        8.293,
        7.986,
        7.627,
        7.512,
        7.435,
        7.053,
        6.705,
        6.797,
        6.105,
        6.115,
        5.631,
        5.631,
        5.131,
    ),
    "GPT-3 6.7B": (
        5.508,
        5.324,
        5.141,
        4.957,
        4.773,
        4.809,
        4.330,
        4.185,
        3.947,
        4.011,
        4.154,
        3.712,
        3.593,
        3.284,
        3.531,
    ),
}
OOBLECK_EVERY_S = (21600, 10800, 3600, 1800, 600)
OOBLECK_AVERAGES = {  # by OOBLECK_EVERY_S; its own simulator, run by this project on those tables
    "GPT-3 medium": (29.3, 29.3, 29.2, 29.1, 28.7),
    "GPT-3 2.7B": (7.29, 7.28, 7.23, 7.18, 6.89),
    "GPT-3 6.7B": (4.33, 4.31, 4.22, 4.11, 3.55),
}

SWIFT_STORAGE = {  # SWIFT (PPoPP'23), 16 machines of 8 GPUs: bytes of the log, and seconds of a recovery
    "ViT-128/32": ((1.4e12, 126.0), (9e11, 147.5), (6e11, 156.0), (3e11, 171.7), (1e11, 198.6)),
    "BERT-128": ((5e11, 76.5), (1.5e11, 83.0), (8e10, 160.8), (5e10, 184.4)),
}
SWIFT_GAIN = 1.16  # of total training time over CheckFreq and Elastic Horovod, at most


def fraction(system: str, model: str, gpus: int) -> float | None:
    """Return the published throughput of ``system`` on ``gpus`` GPUs as a fraction of the fault-free one, or None."""
    row = FRACTIONS.get((system, model))
    return row[GPUS.index(gpus)] if row and gpus in GPUS else None


def oobleck_measured(model: str) -> dict[int, float]:
    """Return the samples per second that Oobleck's authors measured, by number of nodes."""
    return {30 - place: speed for place, speed in enumerate(OOBLECK_MEASURED[model])}


def curve(system: str, model: str) -> tuple[tuple[float, float], ...]:
    """Return the published curve of ``system`` over the trace as (hour, samples per second); empty if there is none."""
    return tuple(
        (hour, speed)
        for hour, speed in _digitised()[{"350M": "gpt3_350m"}.get(model, model)].get(
            system.lower().replace("-", "_"), ()
        )
    )


@cache
def _digitised() -> dict:
    return json.loads(files(__package__).joinpath("published_recycle.json").read_text())
