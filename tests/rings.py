"""Tests that rings leave out. Those that `make test` keeps show the same on most changes, in less time.

A row is a folder of `tests/`, a file, a test or a case of one. Rows of `KEPT` are exceptions of `WHOLE`.
"""

from __future__ import annotations

WHOLE = (
    # the page in a browser, and what real programs send
    "apps",
    "page",
    # families: three stand for all
    "engine/test_describe.py",
    "engine/test_families.py",
    "engine/test_forwards_buckets.py",
    "engine/test_mtp_head.py",
    "engine/test_pipeline.py::test_stages_compute_together_what_the_whole_model_does",
    "placement/test_planner.py::test_no_way_among_four_macs_is_faster",
    "placement/test_model_shape.py::test_families_that_cannot_be_divided_stay_whole",
    "stories/test_own_families.py",
    "text/test_tool_schemas.py::test_a_kind_of_schema_in_every_place",
    # growth of time and memory with what a client sends
    "api/test_app_growth.py",
    "text/test_answers.py::test_an_endless_row_of_blanks_takes_linear_work",
    "text/test_answers.py::test_a_row_of_marks_takes_linear_work",
    "text/test_answers.py::test_values_in_values_without_end_are_no_arguments",
    "text/test_tool_schemas.py::test_any_json_makes_a_tool",
    "text/test_tool_schemas.py::test_any_pattern_is_enforced_or_left_out",
    "text/test_tool_schemas.py::test_any_schemas_that_refer_to_each_other_make_a_tool",
    "text/test_tool_schemas.py::test_schemas_that_take_too_long_are_those_of_any_object",
    *(
        f"api/dialects/test_request_parts_extent.py::test_a_million_parts_are_refused_before_they_are_read[{of}]"
        for of in ("parse_chat-body4", "parse_count-body2", "parse_count-body3", "parse_messages-body1")
    ),
    "api/dialects/test_request_parts_history.py::test_an_answer_that_comes_back_is_taken",
    "api/test_server_connection.py::test_what_waits_for_a_client_is_bounded",
    "api/test_prompts_replay.py::test_a_change_makes_it_another_conversation",
    "api/test_streaming_waiting.py::test_a_refusal_that_comes_late_is_the_last_event",
    "api/test_streaming_waiting.py::test_what_came_before_the_acceptance_and_what_came_after_is_one_answer",
    "engine/test_grammar.py::test_an_ambiguous_grammar_ends_and_leaves_others_alone",
    "engine/test_grammar.py::test_an_explosive_grammar_is_refused_and_the_next_one_is_not",
    "stories/test_lying_members.py::test_invented_names_fill_no_collection",
    *(
        f"stories/test_lying_members.py::test_no_message_ends_an_agent_or_an_honest_link[part {n}]"
        for n in range(4)
    ),
    "text/test_renderer_contained.py",
    "text/test_tokenizer_import.py::test_another_transformers_is_imported_as_a_whole",
    "wire/test_frames.py::test_noise_is_refused_and_leaves_nothing_behind",
    # many machines on one
    "agents/test_attackers.py",
    "agents/test_authority_survives.py",
    "agents/test_crowd.py",
    "agents/test_going_on.py::test_the_coordinator_is_killed",
    "agents/test_models.py",
    "agents/test_on_a_network.py",
    "agents/test_one_machine.py",
    "agents/test_who_may_come_in.py",
    "discovery/test_mdns_hosts.py",
    "models/test_transfers.py::test_a_member_that_has_it_lends_it_until_the_others_have_it",
    "stories/test_fallback.py",
    "stories/test_jaccl_agents.py",
    "stories/test_load_on_request.py",
    "models/test_transfers_fetching.py",
    # faults that a sibling brings about as well
    "chaos/test_caches.py",
    "chaos/test_deaths.py",
    "chaos/test_disk.py",
    "chaos/test_frames.py",
    "chaos/test_grammars.py",
    "chaos/test_mutations.py",
    "chaos/test_replies.py",
    "engine/test_jaccl_ranks.py::test_giving_back_is_bounded",
    "identity/test_store.py::test_wherever_leaving_is_cut_short_a_mac_is_a_member_or_can_join",
    "test_background_watchdog.py",
    # combinations of features
    "cli/test_launch.py",
    "cli/test_demo.py::test_the_demo_compiles_nothing",
    "cli/test_qualify_here.py",
    "cli/test_status_watch.py::test_a_terminal_shows_it_until_ctrl_c_whether_the_agent_is_there_or_not",
    "clients/test_examples.py",
    "engine/test_batch.py::test_any_course_of_events_gives_every_row_what_it_would_have_alone",
    "engine/test_batch_kernels.py",
    "engine/test_batch.py::test_copies_of_every_kind_go_on_by_themselves",
    *(
        f"engine/test_batch.py::test_merged_rows_say_what_they_would_say_alone[{of}]"
        for of in ("exaone_moe-1", "gpt_oss-0", "qwen3_5-1")
    ),
    "engine/test_draft_model.py::test_rows_together_get_what_each_would_get_alone",
    "engine/test_executor.py::test_after_forwards_alone_a_joint_one_compiles_no_kernel",
    "engine/test_group_timing.py",
    "engine/test_recurrent.py",
    "engine/test_runner_joint_prompts.py::test_each_says_what_it_says_alone_also_from_copies_of_unlike_lengths",
    "engine/test_scheduler.py::test_forced_tokens_that_cost_more_than_they_save_are_fed_one_at_a_time",
    "engine/test_scheduler.py::test_rows_of_unlike_lengths_never_exceed_the_room_and_lose_nothing",
    "engine/test_scheduler.py::test_the_turns_of_a_conversation_hold_its_tokens_once",
    "engine/test_scheduler.py::test_lanes_of_a_pipeline_alternate_and_lose_nothing",
    "groups/test_groups_drain.py",
    "groups/test_warm_pool.py::test_after_a_kill_the_group_is_made_of_spares_and_answers_as_before",
    "repository/test_structure.py::test_one_more_field_of_a_deployment_leaves_room_for_what_it_is_good_for",
    "repository/test_structure.py::test_one_more_verb_is_a_class_and_a_handler",
    "stories/test_commands.py",
    "stories/test_features_checkpoints.py",
    "stories/test_features_choice.py",
    "stories/test_features_disk.py",
    "stories/test_features_guided.py",
    "stories/test_features_mtp.py",
    "stories/test_features_pipeline.py",
    "stories/test_features_prefix.py::test_caches_that_are_cleared_are_gone_on_every_rank_and_what_runs_goes_on",
    "stories/test_features_recurrent.py",
    "stories/test_features_room.py",
    "stories/test_features_windows.py",
    "stories/test_loading.py",
    "stories/test_oracle.py::test_fifty_requests_each_get_their_own_string_back",
    "stories/test_terminal.py",
    "stories/test_tiny_model.py",
    "stories/test_two_models.py",
)

KEPT = (
    "agents/test_attackers.py::test_a_template_that_never_ends_costs_its_request_alone",
    "agents/test_crowd.py::test_a_client_with_many_requests_does_not_starve_one_with_one",
    "agents/test_models.py::test_what_one_has_is_served_by_all",
    "agents/test_on_a_network.py::test_without_a_key_no_client_is_answered_and_the_words_say_how_to_make_one",
    "agents/test_one_machine.py::test_two_agents_serve_together_and_any_of_them_is_asked",
    "agents/test_one_machine.py::test_an_agent_that_is_told_to_end_says_goodbye_and_leaves_nothing",
    "agents/test_who_may_come_in.py::test_strangers_hear_nothing",
    "chaos/test_caches.py::test_a_cache_that_rank_1_has_not_kept",
    "chaos/test_deaths.py::test_killed_while_working",
    "chaos/test_disk.py::test_ranks_that_come_back_with_other_contents_agree",
    "chaos/test_frames.py::test_a_frame_that_breaks_the_rules_is_refused",
    "chaos/test_mutations.py::test_what_one_rank_does_otherwise_ends_the_epoch",
    "clients/test_examples.py::test_the_programs_of_the_documents_count",
    "cli/test_launch.py::test_where_a_key_is_asked_for",
    "discovery/test_mdns_hosts.py::test_two_hosts_find_each_other_and_say_goodbye",
    "engine/test_describe.py::test_the_command_prints_one",
    "engine/test_pipeline.py::test_stages_compute_together_what_the_whole_model_does[deepseek_v32]",
    "engine/test_pipeline.py::test_stages_compute_together_what_the_whole_model_does[full alone]",
    "engine/test_pipeline.py::test_stages_compute_together_what_the_whole_model_does[mamba]",
    *(
        f"engine/test_forwards_buckets.py::test_rows_of_unlike_lengths_say_what_they_say_alone[{of}]"
        for of in ("a CPU-llama", "a CPU-qwen3_next", "a GPU-deepseek_v3", "a GPU-gpt_oss")
    ),
    *(
        "engine/test_runner_joint_prompts.py::"
        f"test_each_says_what_it_says_alone_also_from_copies_of_unlike_lengths[{family}]"
        for family in ("deepseek_v32", "gpt_oss", "nemotron_h", "qwen3_5")
    ),
    "models/test_transfers_fetching.py::test_sizes_that_no_disk_has_are_refused_at_once",
    "stories/test_commands.py::test_a_key_learns_nothing_of_another_one_s_prompt",
    "stories/test_commands.py::test_a_mistake_is_answered_in_the_words_of_its_maker",
    "stories/test_commands.py::test_the_demo_answers_once_and_leaves_nothing",
    "stories/test_fallback.py::test_a_first_group_that_does_not_form_over_jaccl_forms_over_the_ring",
    "stories/test_features_choice.py::test_drafts_are_counted",
    "stories/test_features_choice.py::test_a_seed_is_a_text_and_another_seed_is_another",
    "stories/test_features_disk.py::test_a_block_that_one_rank_lacks_is_a_miss_on_both",
    "stories/test_features_guided.py::test_each_kind_alone",
    "stories/test_features_mtp.py::test_a_kill_in_mid_answer_changes_no_token",
    "stories/test_features_mtp.py::test_greedy_text_is_that_without_drafts",
    "stories/test_features_pipeline.py::test_random_schedules_leave_all_ledgers_equal",
    "stories/test_features_recurrent.py::test_a_conversation_goes_on_behind_drafts",
    "stories/test_features_room.py::test_who_outgrows_the_room_is_put_off_and_comes_back_right",
    "stories/test_loading.py::test_a_model_that_any_rank_refuses_is_let_go_by_all_and_the_group_works",
    "stories/test_loading.py::test_one_model_after_another_in_one_epoch",
    "stories/test_terminal.py::test_a_small_command_imports_no_agent",
    "text/test_renderer_contained.py::test_a_hostile_template_fails_the_request_alone",
    "test_background_watchdog.py::test_an_agent_is_watched",
)

#: Pure, but for seconds: `make quick` leaves them out.
SLOW = (
    "api/dialects/test_request_parts_extent.py::test_a_million_parts_are_refused_before_they_are_read",
    "cli/test_about_doctor.py::test_an_error_is_the_exit_status",
    "cluster/test_links.py::test_a_member_that_floods_is_read_slower_then_cut_and_kept_out_for_a_while",
    "discovery/test_mdns.py::test_a_copy_is_told_once_when_our_own_name_is_known",
    "discovery/test_mdns.py::test_so_many_are_asked_at_once_and_the_silent_again",
    "engine/test_payoff.py::test_hardly_slower_than_the_best_fixed_choice_and_than_none",
    "engine/test_pipeline.py",
    "engine/test_sampler.py::test_draws_follow_the_filtered_distribution",
    "engine/test_scheduler.py::test_room_that_changes_at_any_move_is_kept_to_and_only_what_outgrows_it_fails",
    "engine/test_scheduler.py::test_what_was_on_disk_before_changes_no_answer",
    "engine/test_scheduler.py::test_where_room_is_tight_no_request_exceeds_it_and_none_is_lost",
    "groups/test_fabric.py::test_the_row_of_a_model",
    "groups/test_forwarding.py::test_between_two_groups_of_the_other_agent_its_link_stays",
    "groups/test_on_request.py::test_without_the_option_a_request_waits_for_a_deployment_that_loads_or_recovers",
    "groups/test_selection_desired_model.py::test_the_hub_is_asked_once_for_one_serve",
    "placement/test_model_shape.py::test_families_that_cannot_be_divided_stay_whole",
    "placement/test_planner.py::test_no_way_among_four_macs_is_faster",
    "placement/test_planner_properties.py",
    "repository/test_docs.py",
    "repository/test_measures.py",
    "repository/test_structure.py",
    "stories/test_lying_members.py",
    "wire/test_frames.py::test_noise_is_refused_and_leaves_nothing_behind",
    "wire/test_frames.py::test_nothing_of_earlier_frames_is_kept",
    "wire/test_protocol.py::test_every_illegal_move_is_refused_at_both_ends",
)


def in_whole(test: str) -> bool:
    """Return whether `make test` leaves out a test: its id, below `tests/`."""
    return _named(test, WHOLE) and not _named(test, KEPT)


def is_slow(test: str) -> bool:
    """Return whether `make quick` leaves out a test that is not marked: its id, below `tests/`."""
    return _named(test, SLOW)


def lies_outside(path: str, rows: tuple[str, ...]) -> bool:
    """Return whether `rows`, WHOLE or SLOW, leave out a folder or file below `tests/` with all its tests."""
    kept = rows is WHOLE and any(row.startswith((f"{path}/", f"{path}::")) for row in KEPT)
    return path in rows and not kept


def _named(test: str, rows: tuple[str, ...]) -> bool:
    return any(test.startswith(row) and test[len(row) :][:1] in ("", "/", ":", "[") for row in rows)
