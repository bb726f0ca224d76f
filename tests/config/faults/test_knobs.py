from __future__ import annotations

import pytest

from wellfed.config.faults.knobs import all_knobs, in_order, in_words, knob_type, nearest, nearest_knob, stand_in
from wellfed.config.schema import Backend, RunConfig


def test_leaves_only():
    knobs = list(all_knobs(RunConfig))
    assert "workload.schedule.min_lr_frac" in knobs
    assert "workload.model" in knobs
    assert "gpu" not in knobs
    assert len(knobs) == len(set(knobs)) > 50


@pytest.mark.parametrize(
    ("dotted", "words"),
    [
        ("seed", "a whole number"),
        ("gpu.memory_gib", "a number or null"),
        ("gpu.tf32", "true or false"),
        ("resume", "a text or null"),
        ("loader.backend", "one of auto, torch, inline, threads, processes"),
        ("memory.features", "one of cache, cache_host, dynamic or null"),
        ("loader.skip_ids", "a list [..] of whole numbers"),
        ("config.allow_targets", "a list [..] of texts"),
        ("sweep.retry", "a list [..] of ok, oom, failed, killed, timeout"),
        ("memory.stages", "a list [..] of {..} entries or null"),
        ("paths", "a group of knobs (log_dir, cache_dir)"),
        ("workload.model", "any value"),
    ],
)
def test_types_in_words(dotted, words):
    assert in_words(knob_type(RunConfig, dotted)) == words


@pytest.mark.parametrize("dotted", ["nope", "gpu.nope", "seed.more", "workload.model.dim", "gpu..tf32", ""])
def test_no_such_knob(dotted):
    assert knob_type(RunConfig, dotted) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("loader.num_worker", "loader.num_workers"),
        ("lodaer.num_workers", "loader.num_workers"),
        ("prefetch_factor", "loader.prefetch_factor"),
        ("loader.micro_batch", "memory.micro_batch"),
        ("trainer.precision", "gpu.precision"),
        ("workload.bar", None),
        ("gpu.zzz", None),
    ],
)
def test_the_knob_that_was_meant(typed, meant):
    assert nearest_knob(RunConfig, typed) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("24", "24gb"), ("42gb", "24gb"), ("AUTO", "auto"), ("24GB", "24gb"), ("zzz", None), ("", None)],
)
def test_the_option_that_was_meant(typed, meant):
    assert nearest(typed, ["8gb", "16gb", "24gb", "80gb", "auto", "cpu"]) == meant


def test_options_are_listed_as_a_reader_counts():
    assert in_order(["auto", "16gb", "8gb", "cpu", "80gb"]) == ["8gb", "16gb", "80gb", "auto", "cpu"]
    assert in_order(["recsys_starved", "recsys_16gb", "recsys_8gb"]) == ["recsys_8gb", "recsys_16gb", "recsys_starved"]


def test_stand_ins_have_the_right_type():
    assert stand_in(RunConfig, "workload.effective_batch_size") == 1
    assert stand_in(RunConfig, "workload.name") == "unknown"
    assert stand_in(RunConfig, "workload.model") is None
    assert stand_in(RunConfig, "seed") == 1
    assert stand_in(RunConfig, "loader.backend") is Backend.auto
    assert stand_in(RunConfig, "loader.skip_ids") == []
    assert stand_in(RunConfig, "workload.model.deep.inside") is None
