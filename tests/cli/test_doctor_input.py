"""``recycle doctor``: bad input is one line, and neither torch nor DeepSpeed is needed to say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_plugin.cli import main
from tests.support.doctor import HEALTHY, of_a_run

pytestmark = pytest.mark.usefixtures("surroundings")
SHAPE = "--pp 2 --dp 2"


ZERO = json.dumps({"forward": [0, 0], "input": [0, 0], "weight": [0, 0]})


@pytest.mark.parametrize(
    "config, arguments, says",
    [
        ([1], SHAPE, "ds.json holds [1]: give the path of DeepSpeed's JSON"),
        ({}, SHAPE, "has neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ({**HEALTHY, "recycle": 3}, SHAPE, 'write an object such as {"enabled": true}'),
        ({**HEALTHY, "recycle": {"enabeld": True}}, SHAPE, "recycle.enabeld: no such key; did you mean enabled?"),
        ({**HEALTHY, "recycle": {"activation_cap": [1, 2, 3]}}, SHAPE, "3 entries for 2 stages"),
        ({**HEALTHY, "recycle": {"activation_cap": "auto"}}, SHAPE, "write a whole number"),
        (
            {**HEALTHY, "recycle": {"costs": "zero.json"}},
            SHAPE,
            "recycle.costs are 0",
        ),
        ({**HEALTHY, "gradient_clipping": "auto"}, SHAPE, 'ds.json: gradient_clipping is "auto"; write a number'),
        (
            {**HEALTHY, "gradient_accumulation_steps": 0},
            SHAPE,
            "gradient_accumulation_steps is 0; write a whole number",
        ),
        ({**HEALTHY, "train_batch_size": True}, SHAPE, "train_batch_size is true; write a whole number"),
        ({**HEALTHY, "fp16": True}, SHAPE, "fp16 is true; write an object"),
        (HEALTHY, "--pp 0 --dp 2", "--pp 0: write a whole number of at least 1"),
        (HEALTHY, "--pp 2 --dp -1", "--dp -1: write a whole number of at least 1"),
        (HEALTHY, f"{SHAPE} --micro-batches 0", "--micro-batches 0: write a whole number of at least 1"),
        (HEALTHY, f"{SHAPE} --hostfile nowhere", "--hostfile nowhere: No such file or directory; give the path"),
        (
            HEALTHY,
            f"{SHAPE} --hostfile few",
            "--hostfile few: 3 slots for 2 stages x 2 replicas; write hosts with 4 slots together",
        ),
        (
            HEALTHY,
            f"{SHAPE} --hostfile twice",
            "--hostfile twice, line 2: a stands there twice; write one line for each host",
        ),
        (HEALTHY, f"{SHAPE} --hostfile bad", '--hostfile bad, line 1: "a 4"; write lines such as worker-1 slots=4'),
        (HEALTHY, f"{SHAPE} --hostfile binary", "--hostfile binary: no text; give the path"),
        (HEALTHY, f"{SHAPE} --profile nowhere", "--profile nowhere: No such file or directory; give the path"),
        (HEALTHY, f"{SHAPE} --profile ds.json", "--profile ds.json: no costs: no forward, no input, no weight"),
        (HEALTHY, f"{SHAPE} --profile binary", "--profile binary: no costs: 'utf-8' codec"),
        (HEALTHY, "--pp 8 --dp 2 --profile costs.json", "--profile costs.json: costs of 2 stages, and --pp is 8"),
        (
            {**HEALTHY, "recycle": {"enabled": True, "faults": ["kill 7.0 before 0F0.0@2"]}},
            SHAPE,
            "recycle.faults: 'kill 7.0 before 0F0.0@2' names seat 7.0, and the topology is",
        ),
        (
            {"recylce" if key == "recycle" else key: value for key, value in {"recycle": {}, **HEALTHY}.items()},
            SHAPE,
            '"recylce" in the DeepSpeed config: no such section; did you mean "recycle"?',
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, config, arguments, says) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(config))
    for name, text in {"few": "a slots=3", "twice": "a slots=2\na slots=2", "bad": "a 4", "zero.json": ZERO}.items():
        Path(name).write_text(text)
    Path("binary").write_bytes(b"\xff\xfe\xff")
    of_a_run()
    assert_refused(capsys, ["doctor", "ds.json", *arguments.split()], says)


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "No such file or directory"),
        ("{'a': 1}", "is no JSON: Expecting property name"),
        ("[" * 100_000, "is no JSON"),
        (b"\xff", "is no JSON"),
    ],
)
def test_what_is_no_config_is_one_line(tmp_path, capsys, content, says) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(
        capsys,
        ["doctor", str(path), *SHAPE.split()],
        says,
        'give the path of DeepSpeed\'s JSON with a "recycle" section',
    )


def assert_refused(capsys, arguments: list[str], *says: str) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert all(part in said.err for part in says), said.err
    assert said.err.startswith("recycle: ") and said.err.count("\n") == 1 and said.out == ""


def test_no_framework_is_imported(tmp_path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**HEALTHY, "optimizer": {"type": "Adam"}}))
    script = f"""
import sys
from recycle_plugin.cli import main
main(["doctor", {str(tmp_path / "ds.json")!r}, "--pp", "2", "--dp", "2", "--json"])
print(sorted({{"torch", "deepspeed", "megatron"}} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stderr.strip() == "[]" and json.loads(done.stdout)["job"]["stages"] == 2
