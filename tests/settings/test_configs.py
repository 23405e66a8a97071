"""Hydra's groups compose into one job, and say the same as the settings."""

from pathlib import Path

import pytest
import yaml

from recycle_plugin import configs
from recycle_plugin.core.vocabulary.faults import Fault
from recycle_plugin.lab.training.compose import (
    ComposeError,
    EmulatedModel,
    GPTModel,
    compose,
    compose_from_command_line,
)
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.wording import SettingsError

ROOT = Path(configs.__file__).parent


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / group).glob("*.yaml"))


def test_the_recycle_group_repeats_the_settings_keys_and_defaults():
    written = yaml.safe_load((ROOT / "recycle" / "default.yaml").read_text())
    assert list(written) == list(Settings.model_fields)
    assert Settings.from_section(written) == Settings()


def test_the_main_job():
    job = compose(["model=gpt_tiny", "topology=pp2_dp2", "recycle.enabled=true", "faults=kill_one", "steps=20"])
    assert (job.topology.stages, job.topology.replicas, job.workers, job.steps) == (2, 2, 4, 20)
    config = job.deepspeed_config()
    assert config["gradient_clipping"] == 0.0 and config["gradient_accumulation_steps"] == job.topology.micro_batches
    settings = Settings.from_section(config["recycle"])
    assert settings.enabled and settings.run_dir == job.run_dir and settings.seed == job.seed
    (fault,) = settings.fault_list
    assert fault == Fault.parse("kill 0.1 before 1F0.1@10")


def test_one_run_folder_and_one_seed():
    job = compose(["run_dir=runs/a", "seed=7"])
    assert (job.recycle["run_dir"], job.recycle["seed"]) == ("runs/a", 7)


@pytest.mark.parametrize(
    "override",
    [
        f"{group}={option}"
        for group in ("model", "topology", "data", "optimizer", "experiment")
        for option in options(group)
    ],
)
def test_every_option_composes(override):
    job = compose([override, *(["topology=pp2_dp2"] if override.startswith("model") else [])])
    assert isinstance(job.model, (GPTModel, EmulatedModel))


@pytest.mark.parametrize("written, cap", [("3", 3), ("[4,2]", (4, 2)), ("1f1b", "1f1b")])
def test_a_cap_is_overridden_in_every_form(written, cap):
    assert Settings.from_section(compose([f"recycle.activation_cap={written}"]).recycle).activation_cap == cap


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stepz=3"], "stepz: no such key; did you mean steps?"),
        (["recycle.enable=true"], "recycle.enable: no such key; did you mean recycle.enabled?"),
        (["+recycle.enable=true"], "recycle.enable: no such key; did you mean enabled?"),
        (["steps=abc"], 'steps: "abc"; input should be a valid integer'),
        (["~steps"], "steps: field required"),
        (["foo"], "Error parsing override 'foo' missing EQUAL at '<EOF>'"),
        (["topology.stages=9"], "topology.stages: 9 stages for 6 layers; write at most 6, or raise model.layers"),
        (
            ["recycle.enabled=true", "steps=4", 'recycle.faults=["kill 0.1 before 1F0.1@5"]'],
            "recycle.faults[0]: 'kill 0.1 before 1F0.1@5' names step 5, and the run has steps 1 to 4; write a step "
            "such as 1F0.1@2",
        ),
        (["model.heads=3"], "model.heads: 3 does not divide model.hidden = 128; write a divisor"),
    ],
)
def test_a_wrong_override_gets_one_line(overrides, expected):
    with pytest.raises((ComposeError, SettingsError)) as caught:
        compose(overrides)
    assert str(caught.value) == expected


def test_an_unknown_option_lists_the_others():
    with pytest.raises(ComposeError) as caught:
        compose(["model=gpt_tin"])
    assert "\n" not in str(caught.value) and all(option in str(caught.value) for option in options("model"))


@pytest.mark.parametrize("flag", [["--local_rank=3"], ["--local-rank", "3"]])
def test_the_launchers_rank_is_dropped_wherever_it_stands(flag):
    assert compose_from_command_line([*flag, "steps=3", "seed=1"], "").steps == 3
    assert compose_from_command_line(["steps=3", *flag, "seed=1"], "").seed == 1


@pytest.mark.parametrize("arguments", [["stepz=3"], ["--steps=3"], ["recycle.rng=stream"]])
def test_the_command_line_ends_with_one_line(arguments):
    with pytest.raises(SystemExit) as caught:
        compose_from_command_line(arguments, "")
    assert len(caught.value.code.splitlines()) == 1


def test_the_topology_has_to_fit_the_workers():
    assert compose_from_command_line(["topology=pp2_dp2"], "", workers=4).workers == 4
    with pytest.raises(SystemExit) as caught:
        compose_from_command_line(["topology=pp2_dp2"], "", workers=2)
    assert caught.value.code.endswith("need 4 workers, and 2 started; launch with deepspeed --num_gpus 4")


def test_a_key_of_another_group_member_is_said_to_be_one():
    with pytest.raises(ComposeError, match="model.hidden: the chosen model has no such key; see configs/model/"):
        compose(["model=emulated", "model.hidden=3"])
