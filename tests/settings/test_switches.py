"""Each switch of the settings table, and the test that sees at run time what it does: in what is executed, in events,
or in what a job leaves.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recycle_plugin.core.vocabulary.cost import CostModel
from recycle_plugin.core.vocabulary.topology import Topology
from recycle_plugin.lab.simulator import predict
from recycle_plugin.planner import plan
from recycle_plugin.settings.schema import Settings
from recycle_plugin.settings.sections import SECTIONS

ROOT = Path(__file__).parents[2]
SEEN = {
    "enabled": "cluster/test_as_stock.py::test_under_the_plugins_launcher",
    "split_backward": "cluster/test_switches.py::test_without_rerouting_a_loss_ends_the_job",
    "stagger_optimizer": "cluster/test_switches.py::test_no_stage_steps_before_all_have_their_gradients",
    "reroute": "cluster/test_switches.py::test_without_rerouting_a_loss_ends_the_job",
    "activation_cap": "cluster/test_caps.py::test_room_for_one_micro_batch",
    "norm": "cluster/test_as_stock.py::test_the_true_norm",
    "clip": "cluster/test_validate.py::test_without_a_failure_it_is_bit_for_bit_what_waiting_gives",
    "nonfinite": "cluster/test_validate.py::test_the_job_ends_where_they_are_not_to_be_skipped",
    "loss_scaling": (
        "cluster/test_loss_scale.py::"
        "test_an_overflow_takes_the_scale_down_on_all_stages_and_what_had_the_old_one_is_void"
    ),
    "undo": "runtime/test_undo_deepspeed.py::test_the_engine_keeps_the_gradient_that_is_applied_the_clipped_one",
    "exact": "cluster/test_exact.py::test_without_exact_mode_the_same_failure_changes_bits",
    "unit": "cluster/test_replica_units.py::test_a_replica_goes_whole_and_comes_back_whole",
    "replicas": "cluster/test_sharded.py::test_as_stock_with_all_ranks",
    "batch": "cluster/test_replica_units.py::test_a_batch_shrinks_as_long_as_a_replica_is_out",
    "zero": "cluster/test_bf16.py::test_zero_1_in_fp32",
    "keep_bytes": "cluster/test_kills.py::test_what_was_not_kept_is_run_again",
    "pinned_bytes": "standin/test_device_mistakes.py::test_pinned_memory_has_a_budget_past_which_copies_still_come",
    "rng": "cluster/test_as_stock.py::test_under_the_plugins_launcher",
    "seed": "cluster/test_switches.py::test_without_rerouting_a_loss_ends_the_job",
    "rebalance": "cluster/test_slow.py::test_a_slow_worker_gets_less_work_while_it_is_slow",
    "rejoin": "runtime/test_restarts.py::test_a_killed_worker_is_started_again_by_its_own_supervisor",
    "checkpoint_dir": "cluster/test_saving.py::test_checkpoints_by_themselves",
    "resume_iterators": "cluster/test_iterators.py::test_a_job_goes_on_at_each_iterators_place",
    "leave_on": "cluster/test_operating.py::test_hosts_that_get_a_notice_go_and_the_coordinators_ends_the_job",
    "checkpoint.every": "cluster/test_leaving.py::test_sigterm_at_a_supervisor_ends_the_job",
    "transfer_interface": "runtime/test_catch_up.py::test_newcomers_come_to_the_interface_of_the_setting",
    "group_sums": "cluster/test_averages.py::test_averages_of_scripts_after_a_loss",
    "device_link": "cluster/test_nccl.py::test_a_kill",
    "check_replicas": "cluster/test_replicas.py::test_who_differs_from_two_others_is_given_up",
    "placement": "cluster/test_hosts.py::test_a_host_goes_and_every_stage_has_a_replica_elsewhere",
    "run_dir": "cluster/test_redone.py::test_only_what_the_lost_worker_had_finished_is_run_twice",
    "secret_file": "cluster/test_hosts.py::test_the_secret_is_where_the_config_says",
    "report": "cluster/test_seen.py::test_monitors_status_and_report_when_rank_0_dies",
    "console": "runtime/test_console.py::test_a_quiet_console_shows_what_matters_and_a_step_a_minute",
    "trace": "cluster/test_redone.py::test_only_what_the_lost_worker_had_finished_is_run_twice",
    "faults": "cluster/test_kills.py::test_each_rank_at_named_instructions",
    "progress_timeout_s": "cluster/test_hung.py::test_a_stopped_worker_is_given_up",
    "busy_timeout_s": ("pure/test_suspicions.py::test_a_process_that_computes_has_longer_than_one_that_does_nothing"),
    "last_worker_timeout_s": (
        "pure/test_suspicions.py::"
        "test_the_last_worker_of_a_stage_is_not_given_up_but_the_job_ends_after_its_own_deadline"
    ),
    "idle_timeout_s": (
        "pure/test_failure_detector.py::test_what_may_take_long_has_the_long_deadline_while_somebody_waits"
    ),
    "heartbeat_timeout_s": "cluster/test_partitions.py::test_one_that_is_cut_off_stops_and_the_others_go_on",
    "wait_timeout_s": "runtime/test_session.py::test_a_deadline_names_what_was_waited_for",
    "costs": "cluster/test_caps.py::test_room_for_one_micro_batch",
    "checkpoint": "cluster/test_saving.py::test_checkpoints_by_themselves",
    "checkpoint.overhead": "cluster/test_saving.py::test_checkpoints_by_themselves",
    "checkpoint.keep": "cluster/test_saving.py::test_checkpoints_by_themselves",
    "log": "cluster/test_replayed.py::test_a_job_without_replicas_goes_on",
    "log.boundaries": "cluster/test_log_boundaries.py::test_what_a_list_names_is_logged_and_nothing_else",
    "log.budget": (
        "cluster/test_log_boundaries.py::test_what_is_best_within_the_budget_is_chosen_once_steps_were_measured"
    ),
    "log.folder": "cluster/test_replayed.py::test_logs_are_where_they_are_to_be",
    "log.helpers": "cluster/test_replayed_by_many.py::test_where_nobody_can_help_it_is_replayed_alone",
    "log.ring_bytes": "cluster/test_replayed.py::test_a_full_disk_stops_the_log_and_not_the_training",
    "metrics": "cluster/test_metrics.py::test_a_scrape_says_what_the_log_says",
    "tls": "cluster/test_tls.py::test_a_killed_worker_comes_back_and_the_weights_are_those_without_tls",
}


def test_no_setting_is_without_a_test_that_sees_it() -> None:
    settings = {
        *Settings.model_fields,
        *(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields),
    }
    assert SEEN.keys() == settings


@pytest.mark.parametrize("setting", SEEN)
def test_that_test_is_there(setting: str) -> None:
    path, _, name = SEEN[setting].partition("::")
    text = (ROOT / "tests" / path).read_text()
    assert name in {
        node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("name", ("forward", "input", "weight", "communication", "reduce", "step", "dispatch", "tie"))
def test_each_cost_changes_the_plan(name: str, tmp_path: Path) -> None:
    """And with it what is executed, and in which order: programs come from plans."""
    shape = Topology(2, 3, 4, ((0, 2),))
    costs = CostModel.uniform(3, 1000, 1000, 1000)
    dear = replace(costs, **{name: (7000,) * 3 if isinstance(getattr(costs, name), tuple) else 7000})
    periods = []
    for given in costs, dear:
        (tmp_path / "costs.json").write_text(json.dumps({key: each for key, each in asdict(given).items() if each}))
        settings = Settings.from_section({"enabled": True, "costs": str(tmp_path / "costs.json")})
        assert settings.cost_model(shape) == given
        planned = plan(shape.full(), given, settings.policy(False, shape.stages))
        assert predict(planned, given).period_us <= planned.period_us
        periods.append(planned.period_us)
    assert periods[1] > periods[0] + 6000
