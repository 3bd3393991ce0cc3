"""Every program that writes has a test of its second run: the same input again leaves the same content.

A program that is added without one fails here. The case study as a whole is run again in
``tests/lakehouse/test_main_job.py``, and ``make torture`` runs the writers again after each kill.
"""

from __future__ import annotations

import re

from tests.support.pytest_ids import REPOSITORY, names_a_test
from tools.findings import PYTHON_FOLDERS

DATA_VALUE, QUALITY = "tests/patterns/data_value/", "tests/patterns/quality/"
ERRORS, INGESTION = "tests/patterns/error_management/", "tests/patterns/ingestion/"
IDEMPOTENCY, DATASETS = "tests/patterns/idempotency/", "tests/patterns/datasets/"
STREAMING = "tests/patterns/streaming/"
MAIN_JOB = "tests/lakehouse/test_main_job.py::test_a_rerun_without_its_metastore_changes_no_table_and_loses_no_version"

PROGRAMS = {
    "python_jobs/data_value/bin_pack_orderer.py": (
        f"{DATA_VALUE}test_bin_pack_orderer.py::test_an_empty_window_sends_no_request"
    ),
    "python_jobs/data_value/fifo_orderer_kafka.py": (
        f"{DATA_VALUE}test_fifo_orderer.py::test_records_of_interest_are_sent_when_the_one_before_is_acknowledged"
    ),
    "python_jobs/data_value/static_joiner.py": (
        f"{DATA_VALUE}test_static_joiner_stream.py::"
        "test_each_batch_has_the_newest_version_and_a_reference_on_its_way_ends_the_run"
    ),
    "python_jobs/data_value/static_joiner_api.py": (
        f"{DATA_VALUE}test_static_joiner_api.py::test_rows_get_the_apis_value_and_no_key_is_asked_for_twice"
    ),
    "python_jobs/data_value/incremental_sessionizer.py": (
        f"{DATA_VALUE}test_incremental_sessionizer_job.py::"
        "test_a_replay_gives_the_same_tables_but_for_the_late_visit"
    ),
    "python_jobs/data_value/distributed_aggregator.py": (
        f"{DATA_VALUE}test_distributed_aggregator_job.py::test_the_command_of_the_page_writes_the_cube_of_its_day"
    ),
    "python_jobs/data_value/metadata_decorator.py": (
        f"{DATA_VALUE}test_metadata_decorator.py::"
        "test_a_batch_that_runs_again_is_delivered_again_with_the_same_headers"
    ),
    "python_jobs/data_value/metadata_decorator_s3.py": (
        f"{DATA_VALUE}test_metadata_decorator_s3.py::"
        "test_other_tags_and_bytes_and_times_do_not_change_by_tagging_again"
    ),
    "python_jobs/data_value/wrapper.py": f"{DATA_VALUE}test_wrapper.py::test_a_batch_that_runs_again_adds_nothing",
    "case_study/datasets/blog_platform.py": (
        f"{DATASETS}test_blog_platform.py::test_a_run_over_an_earlier_one_and_split_otherwise_gives_the_same_bytes"
    ),
    "case_study/datasets/topic_hours.py": (
        f"{DATASETS}test_topic_hours.py::test_an_hour_of_the_topic_is_one_entry_a_load"
    ),
    "python_jobs/error_management/checkpointer.py": (
        f"{ERRORS}test_checkpointer.py::test_position_and_state_go_on_after_a_stop"
    ),
    "python_jobs/error_management/dead_letter.py": (
        f"{ERRORS}test_dead_letter.py::test_batch_whose_write_fails_is_run_again_and_doubles_nothing"
    ),
    "python_jobs/error_management/dead_letter_queue.py": (
        f"{ERRORS}test_dead_letter_queue.py::test_letters_are_given_up_with_a_reason_and_once"
    ),
    "python_jobs/error_management/dead_letter_replay.py": (
        f"{ERRORS}test_dead_letter.py::TestReplay::test_fixed_records_join_the_main_table_once"
    ),
    "python_jobs/error_management/dynamic_late_data_integrator.py": (
        f"{ERRORS}test_dynamic_late_data_integrator.py::test_very_late_data_is_found_and_the_next_run_has_nothing_to_do"
    ),
    "python_jobs/error_management/filter_interceptor.py": (
        f"{ERRORS}test_filter_interceptor.py::test_batch_job_replaces_its_run_and_refuses_a_rise"
    ),
    "python_jobs/error_management/kafka_consumer.py": (
        f"{ERRORS}test_kafka_consumer.py::test_records_and_position_are_one_commit_whatever_kafka_holds"
    ),
    "python_jobs/error_management/late_data_detector.py": (
        f"{ERRORS}test_late_data_detector.py::TestSplit::"
        "test_a_restart_goes_on_with_the_watermark_and_an_idle_run_adds_nothing"
    ),
    "python_jobs/error_management/pipeline_circuit_breaker.py": (
        f"{ERRORS}test_pipeline_circuit_breaker.py::test_each_opening_alerts_once"
    ),
    "python_jobs/error_management/static_late_data_integrator.py": (
        f"{ERRORS}test_static_late_data_integrator.py::test_only_the_dates_in_the_lookback_change_and_twice_is_once"
    ),
    "python_jobs/error_management/windowed_counter.py": (
        f"{ERRORS}test_late_data_detector.py::TestSparkWindows::test_a_run_again_without_new_events_changes_no_count"
    ),
    "python_jobs/error_management/windowed_deduplicator.py": (
        f"{ERRORS}test_windowed_deduplicator.py::test_a_batch_that_is_run_again_after_its_write_doubles_nothing"
    ),
    "python_jobs/idempotency/backfill.py": (
        f"{IDEMPOTENCY}test_backfill.py::test_the_job_run_again_does_the_failed_chunk_only"
    ),
    "python_jobs/idempotency/data_overwrite.py": (
        f"{IDEMPOTENCY}test_data_overwrite.py::test_all_days_again_leave_the_same_rows"
    ),
    "python_jobs/idempotency/keyed_files.py": (
        f"{IDEMPOTENCY}test_keyed_sessions.py::test_a_run_has_one_file_whatever_the_clock_says"
    ),
    "python_jobs/data_value/bucketed_table.py": (
        f"{DATA_VALUE}test_bucketed_table.py::test_another_number_of_buckets_needs_a_reorganisation"
    ),
    "python_jobs/data_value/local_aggregator.py": (
        f"{DATA_VALUE}test_local_aggregator.py::test_a_repeated_batch_counts_no_record_twice"
    ),
    "python_jobs/data_value/local_aggregator_kafka.py": (
        f"{DATA_VALUE}test_local_aggregator.py::test_the_reorganised_topic_has_one_group_a_key_and_each_record_once"
    ),
    "python_jobs/data_value/dynamic_joiner.py": (
        "tests/patterns/data_value/test_dynamic_joiner.py"
        "::test_each_pair_is_there_once_whichever_side_came_first_and_whatever_broke_off"
    ),
    "python_jobs/data_value/stateful_sessionizer.py": (
        "tests/patterns/data_value/test_stateful_sessionizer.py"
        "::test_a_batch_that_is_repeated_after_a_crash_writes_no_session_twice"
    ),
    "python_jobs/idempotency/keyed_sessions.py": (
        f"{IDEMPOTENCY}test_keyed_sessions.py::test_a_replay_from_the_beginning_in_other_batches_gives_the_same_rows"
    ),
    "python_jobs/idempotency/proxy.py": (
        f"{IDEMPOTENCY}test_proxy.py::test_readers_find_the_newest_load_and_older_ones_stay"
    ),
    "python_jobs/idempotency/stateful_merger.py": (
        f"{IDEMPOTENCY}test_stateful_merger.py::test_a_run_that_died_before_recording_is_merged_again_into_the_same_table"
    ),
    "python_jobs/idempotency/time_travel.py": (
        f"{IDEMPOTENCY}test_time_travel.py::test_a_name_means_one_version_for_good"
    ),
    "python_jobs/idempotency/transactional_writer.py": (
        f"{IDEMPOTENCY}test_transactional_writer.py::test_a_run_is_written_once_to_each_table"
    ),
    "python_jobs/ingestion/change_data_capture.py": (
        f"{INGESTION}test_change_data_capture.py::test_each_offset_is_there_once_whatever_happens_to_the_checkpoint"
    ),
    "python_jobs/ingestion/change_data_feed.py": (
        f"{INGESTION}test_change_data_feed.py::test_a_batch_that_runs_again_adds_nothing_to_the_table"
    ),
    "python_jobs/ingestion/compactor.py": (
        f"{INGESTION}test_compactor.py::test_a_second_run_and_an_empty_table_are_left_alone"
    ),
    "python_jobs/ingestion/full_loader.py": (
        f"{INGESTION}test_full_loader.py::test_the_exposed_version_can_be_loaded_again"
    ),
    "python_jobs/ingestion/incremental_loader.py": (
        f"{INGESTION}test_incremental_loader.py::test_an_unchanged_file_is_skipped"
    ),
    "python_jobs/ingestion/incremental_table_loader.py": (
        f"{INGESTION}test_incremental_table_loader.py::"
        "test_a_row_on_the_boundary_is_in_one_window_and_a_rerun_adds_nothing"
    ),
    "python_jobs/ingestion/passthrough_replicator.py": (
        f"{INGESTION}test_passthrough_replicator.py::test_a_second_run_copies_nothing"
    ),
    "python_jobs/ingestion/readiness_marker.py": (
        f"{INGESTION}test_readiness_marker.py::test_marking_again_leaves_one_marker_and_the_data"
    ),
    "python_jobs/ingestion/transformation_replicator.py": (
        f"{INGESTION}test_transformation_replicator.py::test_a_rerun_leaves_the_same_rows"
    ),
    "python_jobs/ingestion/external_trigger_http.py": (
        f"{INGESTION}test_external_trigger.py::test_a_run_gets_its_context_and_a_redelivered_event_no_second_run"
    ),
    "python_jobs/idempotency/fast_metadata_cleaner_postgres.py": (
        f"{IDEMPOTENCY}test_fast_metadata_cleaner_postgres.py::"
        "test_four_days_are_200_rows_however_often_the_week_is_loaded"
    ),
    "python_jobs/ingestion/full_loader_postgres.py": (
        f"{INGESTION}test_full_loader_postgres.py::test_the_view_shows_the_newest_version_exactly"
    ),
    "python_jobs/idempotency/proxy_s3.py": (f"{IDEMPOTENCY}test_proxy_s3.py::test_a_version_is_written_once"),
    "python_jobs/idempotency/proxy_postgres.py": (
        f"{IDEMPOTENCY}test_proxy_postgres.py::"
        "test_a_rerun_writes_a_table_of_its_own_and_two_of_one_second_do_not"
    ),
    "python_jobs/idempotency/stateful_merger_postgres.py": (
        f"{IDEMPOTENCY}test_stateful_merger_postgres.py::test_a_replay_shows_the_table_of_its_time"
    ),
    "python_jobs/ingestion/passthrough_replicator_kafka.py": (
        f"{INGESTION}test_topic_replicator.py::"
        "test_the_header_says_where_a_record_comes_from_and_a_rerun_adds_nothing"
    ),
    "python_jobs/idempotency/transactional_writer_kafka.py": (
        f"{IDEMPOTENCY}test_transactional_producer.py::test_records_are_reduced_and_read_once"
    ),
    "python_jobs/idempotency/transactional_writer_postgres.py": (
        f"{IDEMPOTENCY}test_transactional_writer_postgres.py::"
        "test_a_bad_line_of_the_second_file_leaves_nothing_of_the_first"
    ),
    "python_jobs/streaming/api_gateway_http.py": (
        f"{STREAMING}test_api_gateway.py::test_a_restart_delivers_what_the_buffer_holds_in_its_order"
    ),
    "python_jobs/streaming/api_gateway_replay.py": (
        f"{STREAMING}test_api_gateway_replay.py::"
        "test_an_outage_s_records_are_replayed_once_to_their_topics_and_partitions"
    ),
    "python_jobs/streaming/batch_microbatch_continuum.py": (
        f"{STREAMING}test_batch_microbatch_continuum.py::test_the_days_in_any_order_and_again_give_the_same_rows"
    ),
    "python_jobs/streaming/batch_reprocessor.py": (
        f"{STREAMING}test_batch_reprocessor.py::test_a_rerun_leaves_the_same_rows_and_commits_nothing"
    ),
    "python_jobs/streaming/batch_reprocessor_records.py": (
        f"{STREAMING}test_batch_reprocessor_records.py::test_a_rerun_commits_nothing"
    ),
    "python_jobs/streaming/hybrid_source.py": (
        f"{STREAMING}test_hybrid_source.py::test_a_history_that_is_complete_is_not_read_again"
    ),
    "python_jobs/streaming/sidecar.py": (
        f"{STREAMING}test_sidecar.py::test_a_batch_that_is_repeated_after_a_failed_sink_is_in_each_store_once"
    ),
    "python_jobs/streaming/partial_state_writer.py": (
        f"{STREAMING}test_partial_state_writer.py::test_a_batch_that_is_repeated_after_a_crash_changes_no_row"
    ),
    "python_jobs/streaming/zero_etl_synchronizer.py": (
        f"{STREAMING}test_zero_etl_synchronizer.py::test_a_crash_behind_the_commit_copies_nothing_twice"
    ),
    "python_jobs/streaming/streaming_reprocessor.py": (
        f"{STREAMING}test_streaming_reprocessor.py::test_a_second_reprocessing_changes_no_row"
    ),
}
WRITE_NOTHING = {
    "python_jobs/error_management/checkpoint_rewind.py",  # sets a group's offsets, absolute ones
    "case_study/visits_report.py",
    "case_study/live_report.py",
    "python_jobs/quality/audit_files.py",
    "python_jobs/ingestion/readiness_marker_sensor.py",
}
MODELS = {
    "awap": f"{QUALITY}test_audit_write_audit_publish.py::test_a_day_that_runs_again_replaces_itself_alone",
    "data_overwrite": f"{IDEMPOTENCY}test_data_overwrite_sql.py::test_the_statement_replaces_alike_in_both_ansi_modes",
    "incremental": f"{IDEMPOTENCY}test_merger.py::test_the_devices_of_the_page",
    "scd2": f"{DATA_VALUE}test_scd_type_2.py::test_the_model_of_the_page_keeps_the_history_of_each_story",
    "table": MAIN_JOB,
    "snapshot": MAIN_JOB,
    "unit_tables": (
        f"{IDEMPOTENCY}test_fast_metadata_cleaner.py::test_four_days_are_200_rows_however_often_the_week_is_loaded"
    ),
    "versioned_table": f"{INGESTION}test_versioned_table.py::test_the_same_load_again_leaves_the_same_rows_and_tables",
    "view": "",
}


def test_every_program_that_writes_has_a_test_of_its_second_run() -> None:
    found = {
        str(path.relative_to(REPOSITORY))
        for folder in PYTHON_FOLDERS
        for path in (REPOSITORY / folder).rglob("*.py")
        if re.search(r"run_(job|program)\(Parameters, ", path.read_text(encoding="utf-8"))
    }
    # Its docstring shows how a job is run.
    assert found - {"python_jobs/shared/spark/job.py"} == set(PROGRAMS) | WRITE_NOTHING


def test_every_materialization_has_a_test_of_its_second_run() -> None:
    """The package's own, and those of dbt that the case study uses."""
    own = {
        name
        for path in (REPOSITORY / "macros").rglob("*.sql")
        for name in re.findall(r"{% materialization (\w+)", path.read_text(encoding="utf-8"))
    }
    used = {
        name
        for path in (REPOSITORY / "models").rglob("*.sql")
        for name in re.findall(r"materialized='(\w+)'", path.read_text(encoding="utf-8"))
    }
    assert own | used | {"snapshot"} == set(MODELS)


def test_the_tests_of_a_second_run_exist() -> None:
    tests = [*PROGRAMS.values(), *filter(None, MODELS.values())]
    assert [test for test in tests if not names_a_test(test)] == []
