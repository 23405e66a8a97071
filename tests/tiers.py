"""The three tiers of tests, and what belongs to which.

* unit: everything in UNIT_FOLDERS that EVERYTHING and JOBS do not name: no job of several processes.
* jobs: what JOBS names: of real jobs one case a feature, by the plain adapter if it has the feature, and the demo.
* everything: all cases that a run by --kill-seed chooses, and with --all-kills all there are.

`scripts/test` runs unit and jobs, with the same cases in each run. `.ci/run` adds a tenth of everything else, drawn by
the commit. A name is a file, or file::function, below tests/; a number behind a name is the cases of it that run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

UNIT_FOLDERS = ("pure", "torch", "settings", "cli", "runtime", "demo", "checks")
WHOLE_JOBS, OF_EACH = "tests/cluster/", 2  # where each case starts one, and how many a function has by itself
SHARE = 10  # one in so many of the rest is drawn

# Longer than a few seconds of one core, or about what a user waits for.
EVERYTHING = """
checks/test_check_cluster.py
checks/test_stages.py
cli/test_doctor_input.py::test_no_framework_is_imported
demo/test_demo.py::test_an_interrupted_demo_leaves_no_process
demo/test_returns.py
demo/test_stage.py
demo/test_status.py::test_a_job_whose_coordinator_was_killed_runs_no_more
demo/test_tutorial.py
pure/test_campaign.py::test_a_mistake_about_whose_word_counts_is_found
pure/test_campaign.py::test_a_mistake_is_found
pure/test_campaign.py::test_several_processes_find_what_one_does
pure/test_confused.py::test_100_000_words_of_confused_workers_cost_at_most_themselves
pure/test_confused.py::test_no_number_of_words_fills_the_coordinators_memory
pure/test_frozen.py::test_frozen_jobs_end_as_they_did
pure/test_log_choices.py::test_seeded_jobs_draw_choices
pure/test_planner_ahead.py::test_bounds_are_no_higher_than_optima
pure/test_recovery_plan.py::test_every_process_works_out_the_same_rest
pure/test_simulator_history.py::test_a_loss_costs_what_it_costs_instruction_by_instruction
pure/test_state_dump.py::test_a_run_is_the_same_however_often_the_state_is_read_again
runtime/test_restarts.py::test_nothing_grows_over_20_restarts
runtime/test_undo_deepspeed.py
settings/test_distribution.py
torch/test_units.py::test_deepspeeds_own_are_followed
"""

JOBS = """
pure/test_again.py
pure/test_campaign.py::test_random_failures_need_every_rule_and_break_none
pure/test_campaign_covers.py
demo/test_demo.py::test_demo
runtime/test_callers.py
runtime/test_guard.py
runtime/test_launch.py
runtime/test_restarts.py
runtime/test_supervisor.py

cluster/test_kills.py::test_each_rank_at_named_instructions 4
cluster/test_kills.py::test_a_mistake_in_the_recovery_would_be_seen
cluster/test_kills.py::test_a_stage_that_has_stepped_takes_its_step_back
cluster/test_kills.py::test_another_loss_while_recovering
cluster/test_kills.py::test_killed_within_an_instruction
cluster/test_kills.py::test_what_was_not_kept_is_run_again
cluster/test_double_faults.py::test_kills_close_together
cluster/test_random_kills.py::test_kills_from_outside
cluster/test_redone.py::test_only_what_the_lost_worker_had_finished_is_run_twice
cluster/test_roll_forward.py::test_who_has_the_reduced_gradient_dies_as_well
cluster/test_roll_forward.py::test_who_has_the_reduced_gradient_gives_it_to_who_has_not
cluster/test_sample_counts.py::test_every_sample_counts_once
cluster/test_validate.py::test_a_failure_around_a_rejection
cluster/test_validate.py::test_what_was_computed_with_rejected_weights_counts_nowhere
cluster/test_exact.py::test_each_rank_at_named_instructions
cluster/test_caps.py::test_room_for_one_micro_batch
cluster/test_switches.py
cluster/test_nccl.py::test_a_kill
cluster/test_nccl.py::test_a_kill_where

cluster/test_edges.py::test_a_death_after_the_last_step
cluster/test_edges.py::test_a_death_before_the_first_step_ends_the_job
cluster/test_edges.py::test_a_death_in_the_last_step
cluster/test_edges.py::test_sigterm_to_everything_while_training
cluster/test_goodbyes.py::test_a_stage_that_is_lost_in_the_last_step_comes_to_its_end
cluster/test_leaving.py::test_a_stage_without_a_worker_ends_the_job
cluster/test_leaving.py::test_ends_at_different_times_are_no_deaths
cluster/test_leaving.py::test_sigterm_at_a_worker_is_a_planned_leave
cluster/test_operating.py::test_a_seat_leaves_and_is_admitted_again
cluster/test_words.py::test_an_error_in_one_script_is_the_loss_of_its_worker
cluster/test_words.py::test_scripts_that_all_vanish_with_code_0_behind_the_last_step_have_done_the_job 1
cluster/test_signals.py::test_a_signal_to_a_task_of_slurms_reaches_its_script_once
cluster/test_folders.py::test_a_second_job_in_a_run_folder_is_refused_and_the_first_goes_on

cluster/test_between_steps.py
cluster/test_evaluation.py::test_whoever_dies_the_mean_is_the_same
cluster/test_checkpoints.py::test_a_job_goes_on_from_a_degraded_checkpoint
cluster/test_saving.py::test_a_death_while_saving
cluster/test_saving.py::test_another_number_of_replicas
cluster/test_saving.py::test_load_while_training
cluster/test_full_disk.py::test_a_checkpoint_that_one_worker_cannot_write_is_none_for_all_and_a_script_may_go_on
cluster/test_full_disk.py::test_a_trace_and_a_log_that_cannot_be_written_are_dropped_and_come_back
cluster/test_seen.py::test_a_stage_that_all_leave_leaves_a_checkpoint_to_go_on_from

cluster/test_rejoin.py::test_it_trains_on_with_the_others
cluster/test_rejoin.py::test_in_exact_mode_it_has_the_same_bits
cluster/test_odd_optimizers.py::test_it_comes_back_with_its_worker 3
cluster/test_odd_optimizers.py::test_steps_of_one_that_calls_no_hooks_are_taken_back
cluster/test_restarts.py::test_its_own_supervisor_starts_it_and_the_others_train_as_if_it_had_stayed_away
cluster/test_replicas.py::test_replicas_are_the_same_to_the_bit_whoever_dies
cluster/test_replicas.py::test_who_differs_from_two_others_is_given_up
cluster/test_replica_units.py::test_a_batch_shrinks_as_long_as_a_replica_is_out
cluster/test_hung.py::test_a_stopped_worker_is_given_up
cluster/test_hung.py::test_a_worker_that_is_stuck_in_an_instruction_is_given_up
cluster/test_healthy.py::test_nobody_who_is_healthy_is_given_up
cluster/test_slow.py
cluster/test_slow_replicas.py::test_a_slow_replica_is_named_with_the_rank_that_is_late
cluster/test_partitions.py::test_one_that_is_cut_off_stops_and_the_others_go_on
cluster/test_partitions.py::test_a_sum_whose_connections_break_is_tried_again_over_new_ones
cluster/test_guards.py::test_the_coordinators_process_may_be_killed_and_the_next_one_too
cluster/test_guards.py::test_workers_do_not_notice_that_their_supervisors_are_killed
cluster/test_hsdp.py::test_whoever_dies_it_trains_what_one_process_trains 1
cluster/test_hsdp.py::test_a_replica_comes_back_to_the_shards_of_its_peers
cluster/test_hsdp.py::test_a_stock_script_loads_what_is_saved_and_any_number_of_processes_goes_on
cluster/test_script_store.py::test_it_outlives_the_coordinators_process

cluster/test_replayed.py::test_a_job_without_replicas_goes_on
cluster/test_replayed.py::test_a_checkpoint_that_was_removed_ends_the_job_at_once_and_an_older_one_is_named 1
cluster/test_replayed.py::test_a_stage_that_has_lost_all_replicas_is_replayed_by_one
cluster/test_replayed_along.py::test_one_of_two_replicas_replays_along
cluster/test_replayed_by_many.py::test_a_helper_that_is_killed_in_the_middle_is_one_less
cluster/test_log_boundaries.py::test_what_a_list_names_is_logged_and_nothing_else
cluster/test_logs_apart.py::test_a_stage_is_replayed_from_folders_that_only_supervisors_see

cluster/test_strangers.py::test_nobody_at_the_coordinators_port_is_believed
cluster/test_strangers.py::test_no_strangers_tensor_is_trained_on_or_kept
cluster/test_tls.py::test_a_killed_worker_comes_back_and_the_weights_are_those_without_tls
cluster/test_metrics.py::test_the_url_is_said_and_gone_with_the_job

cluster/test_megatron_lm.py::test_without_a_failure_it_has_the_bits_of_stock 1
cluster/test_megatron_lm.py::test_whoever_dies_the_others_train_the_bits_of_stock 1

cluster/test_plain.py::test_a_checkpoint_goes_on_as_if_nothing_was
cluster/test_plain.py::test_a_scripts_own_backward_survives_its_peers
cluster/test_plain.py::test_it_trains_what_one_process_trains_without_it
cluster/test_plain.py::test_the_documents_scripts_run_as_they_stand
cluster/test_plain_launcher.py::test_a_signal_ends_the_job_at_a_commit
cluster/test_plain_launcher.py::test_nobody_needs_deepspeed_nor_the_launcher_torch
"""

# By DeepSpeed, what the plain adapter has not: from a warm server, but for the last three.
DEEPSPEED = """
cluster/test_as_stock.py::test_unclipped_against_the_script_without_the_plugin
cluster/test_bf16.py::test_a_newcomer_has_the_same_bits
cluster/test_fp16.py::test_kills_where_steps_overflow
cluster/test_tied.py::test_killed_wherever_stages_share_weights
cluster/test_iterators.py::test_either_end_in_mid_step
cluster/test_iterator_returns.py::test_a_replica_goes_on_at_its_place
cluster/test_from_the_top.py::test_a_script_that_comes_back_trains_on_as_if_nothing_had_been
cluster/test_seats.py::test_a_seat_goes_whole_and_comes_back_whole
cluster/test_shapes.py::test_tuples_of_changing_shapes
cluster/test_surface.py::test_each_name_of_the_engine_has_stocks_value_or_is_refused
cluster/test_replica_units.py::test_a_replica_goes_whole_and_comes_back_whole
cluster/test_hugging_face.py::test_a_lost_replicas_samples_are_in_no_loss 1
cluster/test_sharded.py::test_whoever_is_killed_its_replica_goes_and_its_samples_are_drawn_by_the_others 2
cluster/test_sharded.py::test_a_replica_comes_back_and_begins_at_the_others_step
cluster/test_sharded.py::test_as_stock_with_all_ranks
cluster/test_forks.py::test_helpers_do_what_they_do_anywhere_and_the_job_goes_on

cluster/test_bad_input.py::test_busy_port
cluster/test_launchers.py::test_a_host_dies_under_pdsh
cluster/test_words.py::test_a_job_whose_launcher_was_killed_goes_on_and_can_be_stopped
"""


def named(text: str) -> dict[str, int]:
    """The cases that may run of each name, without a number in a list: 0, all, of a file; 1 of a function."""
    found = {}
    for line in text.split("\n"):
        name, _, count = line.partition(" ")
        if name:
            found[name] = int(count) if count else int("::" in name and name.startswith("cluster/"))
    return found


REST, IN_JOBS = named(EVERYTHING), named(JOBS) | named(DEEPSPEED)


def place(item: pytest.Item) -> tuple[str, str]:
    """The names, below tests/, of the item's file and of its function."""
    name = item.nodeid.removeprefix("tests/").partition("[")[0]
    return name.partition("::")[0], name


def tier(item: pytest.Item) -> str:
    file, function = place(item)
    for names, found in ((REST, ""), (IN_JOBS, "jobs")):
        if function in names:
            return found
    for names, found in ((REST, ""), (IN_JOBS, "jobs")):
        if file in names:
            return found
    return "unit" if file.partition("/")[0] in UNIT_FOLDERS else ""


def chosen(items: list[pytest.Item], tiers: Iterable[str], draw: int | None) -> Iterator[pytest.Item]:
    """The items of these tiers, of a function of many cases so many as its name says, by the plain adapter if there is
    one, and with ``draw`` a share of all others.
    """
    left: dict[str, int] = {}
    for item in sorted(items, key=_deepspeed):
        name = place(item)[1]
        within = tier(item) in tiers
        if within and IN_JOBS.get(name):
            left.setdefault(name, IN_JOBS[name])
            left[name] -= 1
            within = left[name] >= 0
        if within or (draw is not None and random.Random(f"{draw} {item.nodeid}").randrange(SHARE) == 0):
            yield item


def _deepspeed(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and str(item.callspec.params.get("vehicle")) == "deepspeed"


def not_chosen(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Of cases that are much alike, and of whole jobs all but a few; of those under DeepSpeed's launcher, which were
    chosen before, none.
    """
    alike: dict[str, list[pytest.Item]] = {}
    counts: dict[str, int] = {}
    for item in items:
        marker, of_jobs = item.get_closest_marker("some_of"), item.nodeid.startswith(WHOLE_JOBS)
        if (marker or of_jobs) and not item.get_closest_marker("real_launcher"):
            name = (marker and marker.kwargs.get("among")) or item.nodeid.partition("[")[0]
            alike.setdefault(name, []).append(item)
            (counts[name],) = marker.args if marker else (OF_EACH,)
    left_out = []
    for name, cases in alike.items():
        left_out += random.Random(f"{seed} {name}").sample(cases, max(0, len(cases) - counts[name]))
    return left_out


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=left_out)
    kept = set(items).difference(left_out)
    items[:] = [item for item in items if item in kept]
