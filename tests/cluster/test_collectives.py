"""A collective inside what a training step runs is refused by name at the first micro-batch, on every worker; between
steps it works.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.jobs import assert_one_line

SCRIPT = "tests/jobs/collectives.py"
WORLD = "ranks 0, 1, 2, 3"
PLACES = {  # the function of torch.distributed, whether over all, and the first instructions in which it is called
    "forward": ("all_reduce", False, ["{stage}F{replica}.0@1"]),
    "later": ("all_reduce", True, ["{stage}F{replica}.0@1"]),
    "mean": ("all_reduce", False, ["{stage}F{replica}.0@1"]),
    "barrier": ("barrier", False, ["{stage}F{replica}.0@1"]),
    "send": ("send", True, ["{stage}F{replica}.0@1"]),
    "receive": ("recv", True, ["{stage}F{replica}.0@1"]),
    "gather": ("all_gather_object", False, ["{stage}F{replica}.0@1"]),
    "recomputed": ("all_reduce", True, ["{stage}F{replica}.0@1", "{stage}I{replica}.0@1"]),
    "recomputed otherwise": ("all_reduce", True, ["{stage}F{replica}.0@1", "{stage}I{replica}.0@1"]),
    "backward": ("all_reduce", False, ["{stage}I{replica}.0@1"]),
    "hook": ("all_reduce", False, ["{stage}I{replica}.0@1"]),
    "loss": ("all_reduce", False, ["1F{replica}.0@1"]),
    "data": ("barrier", True, ["{stage}LOAD{replica}.0@1"]),
    "optimizer": ("barrier", True, ["{stage}STEP@1"]),
    "evaluation": ("all_reduce", False, ["{stage}F{replica}.0@-1"]),
}


def test_collectives_in_a_program_are_refused_by_name(launch, tmp_path):
    """Two replicas of two stages, no loss: everybody says it of the instruction that it runs first."""
    folder = tmp_path / "run0"
    result = launch(script=SCRIPT, RECYCLE_TEST_COLLECTIVES=json.dumps({"folder": str(folder), "uncaught": 3})).finish()
    assert sorted(result.records) == [0, 1, 2, 3], result.output[-6000:]
    for rank, record in result.records.items():
        stage, replica, said = rank // 2, rank % 2, record["said"]
        assert said.keys() == PLACES.keys() - ({"loss"} if stage == 0 else set()) | {
            "alone",
            "between steps",
            "a group of Gloo's by name",
        }
        assert {text for place in ("alone", "between steps", "a group of Gloo's by name") for text in said[place]} == {
            "went"
        }
        assert record["backend"] == "recycle"
        for place in said.keys() & PLACES.keys():
            function, over_all, instructions = PLACES[place]
            ranks = WORLD if over_all else f"ranks {2 * stage}, {2 * stage + 1}"
            for instruction in (one.format(stage=stage, replica=replica) for one in instructions):
                of_it = [text for text in said[place] if f" in {instruction}: " in text]
                assert (
                    of_it
                    and of_it[0].startswith(f"torch.distributed.{function} over {ranks}, called at ")
                    and f"{Path(SCRIPT).name}:" in of_it[0]
                ), (place, said[place][:3])
            assert "went" not in said[place]
    assert_one_line(result, "after a loss other workers run its micro-batches")
    (line,) = [line for line in result.output.splitlines() if "after a loss other workers" in line]
    print(line)
    assert "@3: " in line and "recycle_plugin.mean(tensor, group)" in line
