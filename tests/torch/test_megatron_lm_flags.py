"""What the Megatron-LM adapter refuses, by the flag; without Megatron-LM."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from recycle_plugin.adapters.megatron_lm import entry
from recycle_plugin.adapters.megatron_lm.refusals import ROWS, check, refusals
from recycle_plugin.cli import main
from recycle_plugin.errors import RecycleError
from recycle_plugin.settings.schema import Settings

DOCUMENT = (Path(entry.__file__).parents[2] / "docs" / "megatron_lm.md").read_text()
ASKED = {
    "pipeline_model_parallel_layout": Namespace(virtual_pipeline_model_parallel_size=2),
    "cuda_graph_impl": "local",
    "optimizer": "muon",
    "dataloader_type": "cyclic",
}
"""Of flags that take a word, one that is refused."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.flag)
def test_each_flag_is_refused_by_its_name_and_the_document_has_it(row) -> None:
    value = ASKED.get(row.name, 2)
    (line,) = refusals(Namespace(**{row.name: value}))
    assert line.startswith(f"{row.flag} ") and line.endswith(row.instead) and "\n" not in line
    assert f"`{row.flag}`" in " ".join(DOCUMENT.split())


def test_what_megatron_has_by_default_is_taken() -> None:
    usual = {row.name: None for row in ROWS} | {"optimizer": "adam", "dataloader_type": "single", "num_experts": None}
    assert not [*refusals(Namespace(**usual, save=None, load=None, use_distributed_optimizer=True))]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"save": "there", "ckpt_format": "zarr"}, "--ckpt-format zarr"),
        (
            {"load": "there", "ckpt_format": "torch", "use_distributed_optimizer": True},
            "--use-distributed-optimizer with --load and --ckpt-format torch",
        ),
    ],
)
def test_checkpoints_that_nobody_could_write_or_read_are_refused(given: dict, said: str) -> None:
    (line,) = refusals(Namespace(**given))
    assert line.startswith(said)


def test_a_setting_that_is_not_supported_is_refused() -> None:
    with pytest.raises(RecycleError, match="recycle.unit is not supported with Megatron-LM yet"):
        check(Namespace(), Settings.from_section({"enabled": True, "unit": "replica"}))


@pytest.mark.parametrize(
    "command",
    (["train.py", "--a", "--recycle-config", "r.json", "--b"], ["train.py", "--a", "--recycle-config=r.json", "--b"]),
)
def test_megatron_does_not_see_the_plugins_flag(command: list[str]) -> None:
    assert entry.without_flag(command) == (["train.py", "--a", "--b"], "r.json")
    assert entry.without_flag(["train.py", "--b"]) == (["train.py", "--b"], None)


def test_a_flag_without_a_file_is_refused() -> None:
    with pytest.raises(RecycleError, match="--recycle-config has no file after it"):
        entry.without_flag(["train.py", "--recycle-config"])


@pytest.mark.parametrize("text", ('{"enabled": true}', '{"recycle": {"enabled": true}}'))
def test_the_section_stands_alone_or_under_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    assert entry.read_section(str(tmp_path / "r.json")) == {"enabled": True}


@pytest.mark.parametrize("text", (None, "[1]", "{", "[" * 100_000))
def test_a_file_that_has_no_section_is_refused_in_a_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(RecycleError) as refused:
        entry.read_section(str(tmp_path / "r.json"))
    assert str(tmp_path / "r.json") in str(refused.value) and "\n" not in str(refused.value)


UNFUSED = "--no-gradient-accumulation-fusion"


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--num-layers", "4", UNFUSED], None),
        ([UNFUSED, "--save", "there", "--ckpt-format=torch"], None),
        ([UNFUSED, "--save", "there", "--use-distributed-optimizer"], None),
        ([UNFUSED, "--save", "there", "--ckpt-format", "torch_dcp"], "! --ckpt-format torch_dcp"),
        (["--num-layers", "4"], "! --gradient-accumulation-fusion"),
        (
            [UNFUSED, "--tensor-model-parallel-size", "2"],
            "! --tensor-model-parallel-size 2",
        ),
        ([UNFUSED, "--tensor-model-parallel-size=1"], None),
        ([UNFUSED, "--tensor-model-parallel-size", "two"], "! --tensor-model-parallel-size two"),
        (
            [UNFUSED, "--use-distributed-optimizer", "--load", "x", "--ckpt-format", "torch"],
            "! --use-distributed-opt",
        ),
    ],
)
def test_the_doctor_says_so_before(flags: list[str], said: str | None, capsys) -> None:
    assert main(["doctor", "--megatron", *flags]) == int(said is not None)
    printed = capsys.readouterr().out
    assert printed.startswith(said or "Nothing has to change") and printed.count("\n") == 1
