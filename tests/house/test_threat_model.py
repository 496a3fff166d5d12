"""Each line of the threat model has tests, and what is named here is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "threat-model.md"

TRUSTED = "it is trusted, as the page says: there is nothing to test"
TESTS: dict[str, str | tuple[str, ...]] = {
    "a recipe's `model.factory` and `model.loss`": (
        "tests/model/test_hostile_folders.py::test_python_s_own_library_is_not_called",
        "tests/model/test_hostile_folders.py::test_what_makes_other_things_is_not_called",
    ),
    "your script, under `weft launch` or `weft.session`": TRUSTED,
    "the Python environment": TRUSTED,
    "the user who runs Weft, and root": TRUSTED,
    "every process that can reach torch's data plane": TRUSTED,
    "checkpoints": (
        "tests/run/checkpoint/test_checkpoint_damage.py::test_no_file_outside_the_checkpoint_is_opened",
        "tests/run/checkpoint/test_checkpoint_damage.py::test_no_link_is_followed",
        "tests/run/checkpoint/test_checkpoint_forged.py::test_a_forged_field_never_loads_anything_else",
        "tests/run/checkpoint/test_checkpoint_forged.py::test_pipes_links_and_giants_in_the_place_of_json_are_refused",
    ),
    "checkpoints in an object store": (
        "tests/run/checkpoint/test_object_store.py::test_a_damaged_save_is_passed_over_for_the_one_before",
        "tests/run/checkpoint/test_object_store.py::test_a_place_that_is_none_is_refused_without_repeating_credentials",
    ),
    "weights that other programs saved, by `weft checkpoint import` alone": (
        "tests/run/checkpoint/test_import.py::test_evil_metadata_runs_nothing",
        "tests/run/checkpoint/test_import.py::test_evil_files_run_nothing_and_there_is_no_other_way",
        "tests/run/checkpoint/test_import.py::test_no_file_outside_of_the_folder_is_read",
        "tests/run/checkpoint/test_import.py::"
        "test_the_process_opens_no_connection_starts_no_program_and_takes_no_more_memory",
    ),
    "exports and folders of models": (
        "tests/model/test_hostile_folders.py::test_a_weight_map_stays_in_its_folder",
        "tests/model/test_hostile_folders.py::test_links_lead_out_only_within_the_hub_s_cache",
        "tests/model/test_hostile_folders.py::test_drawn_damage_is_an_error_that_names_the_folder",
    ),
    "prepared corpora": (
        "tests/run/data/test_prepare.py::test_corruption_is_found",
        "tests/run/data/test_prepare.py::test_damaged_manifest_is_refused",
    ),
    "texts, `.jsonl`, `.parquet`, Arrow, tokenizers": (
        "tests/run/data/test_prepare.py::test_text_that_spells_the_separator_forges_no_border",
        "tests/run/data/test_arrow.py::test_a_folder_that_is_not_as_saved",
    ),
    "images, sounds, arrays beside rows of data": (
        "tests/run/data/test_named.py::test_what_is_wrong_is_named_with_its_line",
        "tests/run/data/test_image_folder.py::test_a_broken_image_is_named",
        "tests/run/data/test_processors.py::test_a_file_that_is_no_sound",
    ),
    "processors of a model's folder": ("tests/run/data/test_processors.py::test_code_of_the_folder_does_not_run",),
    "plans, clusters, `--set`": (
        "tests/config/test_hostile_documents.py::test_drawn_documents_are_read_or_refused",
        "tests/config/test_hostile_documents.py::test_what_is_there_to_exhaust_a_reader_is_refused_soon",
    ),
    "names of runs, hosts and folders": (
        "tests/house/test_house.py::test_nothing_banned",
        "tests/events/test_files.py::test_a_run_name_cannot_lead_elsewhere",
    ),
    "launcher, fork server, ranks, processes that tokenize": (
        "tests/run/launch/test_launch_function.py::test_ranks_listen_on_loopback_only",
    ),
    "where ranks of one machine meet": (
        "tests/run/launch/test_launch_script.py::test_the_store_of_scripts_listens_on_loopback_alone",
    ),
    "saves in memory, and how far ranks have come": (
        "tests/run/checkpoint/test_tiers.py::test_what_a_killed_supervisor_left_is_removed_by_the_next",
        "tests/run/checkpoint/test_alterations.py::test_what_was_altered_is_found_and_the_save_before_is_used",
    ),
    "a request for another plan of a run that goes on": (
        "tests/run/supervise/test_replan.py::test_a_plan_that_does_not_fit_is_refused_and_the_run_goes_on",
    ),
    "the dashboard (`weft watch`)": (
        "tests/watch/test_server.py::test_only_who_has_the_token_is_answered",
        "tests/watch/test_server.py::test_nothing_but_get_is_answered",
        "tests/watch/test_server.py::test_a_foreign_host_is_refused",
        "tests/watch/test_server.py::test_a_page_of_another_site_is_refused",
        "tests/watch/test_watch_pages.py::test_names_are_text_whatever_they_are",
    ),
    "shared memory": ("tests/comm/test_shared_memory_arena.py::test_memory_that_is_not_there_is_no_bus_error",),
    "torch's data plane (Gloo, NCCL)": (
        "tests/run/launch/test_launch_function.py::test_ranks_listen_on_loopback_only",
    ),
    "a store between machines (torchrun's, `MASTER_ADDR`)": TRUSTED,
    "what hosts report of their ranks (`weft train --nodes`, torchrun)": (
        "tests/watch/test_hosts_record.py::test_who_does_not_know_the_key_is_not_heard",
        "tests/watch/test_hosts_record.py::test_what_is_no_report_is_refused",
    ),
    "what hosts of a job tell one another (`--rendezvous`)": (
        "tests/run/hosts/test_signed.py::test_garbage_is_not_believed",
        "tests/run/hosts/test_signed.py::test_neither_is_what_was_altered_or_moved",
        "tests/run/hosts/test_signed.py::test_a_stranger_in_the_registry_is_left_out",
        "tests/run/hosts/test_signed.py::test_what_was_signed_at_an_earlier_meeting_does_not_hold",
    ),
    "jobs of Ray (`--on ray`)": (
        "tests/run/hosts/test_ray_request.py::test_a_token_is_read_from_a_file_that_its_user_alone_may_read",
        "tests/run/hosts/test_ray_request.py::test_an_address_that_is_none_or_public_is_refused",
        "tests/run/hosts/test_ray_request.py::test_what_is_no_ray_or_too_old_is_said",
        "tests/run/hosts/test_pools_init.py::test_ray_is_started_on_each_host_and_its_pool_is_what_was_meant",
        "tests/run/hosts/test_pools_init.py::test_a_dashboard_listens_on_no_public_address",
    ),
    "environment": (
        "tests/run/launch/test_launch_script.py::test_half_an_environment",
        "tests/run/launch/test_default_group.py::test_a_port_of_the_environment_that_is_none_is_refused",
    ),
}
"""Line of the page's tables, by its first cell → tests; a text where there is nothing to test."""


def test_each_line_has_tests() -> None:
    rows = re.findall(r"^\| (.+?) \| ", PAGE.read_text(), flags=re.MULTILINE)
    assert set(rows) - {"what", "channel"} == set(TESTS)


def test_they_are_there() -> None:
    named = [test for tests in TESTS.values() if isinstance(tests, tuple) for test in tests]
    missing = []
    for test in named:
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.is_file() or f"\ndef {name}(" not in file.read_text():
            missing.append(test)
    assert not missing
