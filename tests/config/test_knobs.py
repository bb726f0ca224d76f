import dataclasses

import pytest
from omegaconf import MISSING

from wellfed.config.faults.explain_refusal import nearest, nearest_knob
from wellfed.config.knobs import all_knobs, entries, in_order
from wellfed.config.schema import Backend, EvaluateConfig, RunConfig

KNOBS = entries(RunConfig)


def test_leaves_only():
    knobs = all_knobs(RunConfig)
    assert "workload.schedule.min_lr_frac" in knobs
    assert "workload.model" in knobs
    assert "gpu" not in knobs
    assert len(knobs) == len(set(knobs)) > 50


@pytest.mark.parametrize(
    ("dotted", "words"),
    [
        ("seed", "a whole number >= 0 and < 2**63"),
        ("gpu.memory_gib", "a number > 0 or null"),
        ("gpu.tf32", "true or false"),
        ("resume", "a text or null"),
        ("loader.backend", "one of auto, torch, inline, threads, processes, own"),
        ("memory.features", "one of cache, cache_host, dynamic or null"),
        ("loader.skip_ids", "a list [..] of whole numbers >= 0"),
        ("logger.tags", "a list [..] of texts"),
        ("sweep.retry", "a list [..] of ok, oom, failed, killed, timeout"),
        ("paths", "a group of knobs (log_dir, cache_dir, output_dir)"),
        ("workload.model", "any value"),
    ],
)
def test_types_in_words(dotted, words):
    assert KNOBS[dotted].must_be == words


@pytest.mark.parametrize("dotted", ["nope", "gpu.nope", "seed.more", "workload.model.dim", "gpu..tf32", ""])
def test_no_such_knob(dotted):
    assert dotted not in KNOBS


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


@pytest.mark.parametrize("schema_type", [RunConfig, EvaluateConfig])
def test_every_entry_has_a_text_on_one_line(schema_type):
    for knob in entries(schema_type).values():
        assert len(knob.text) > 5, knob.name
        assert "\n" not in knob.text
        assert "  " not in knob.text


def test_groups_have_a_text_too():
    assert KNOBS["workload.schedule.warmup_steps"].text == "Steps of linear warm-up from 0."
    assert KNOBS["loader"].text == "Loading of batches, from disk to device."
    assert entries(EvaluateConfig)["checkpoint"].text.startswith("A checkpoint file")


def test_defaults_are_the_schemas_and_are_not_shared():
    assert KNOBS["workload.name"].default == MISSING
    assert KNOBS["loader.backend"].default is Backend.auto
    assert KNOBS["loader.skip_ids"].default == []
    assert KNOBS["loader.skip_ids"].default is not KNOBS["loader.skip_ids"].default
    assert RunConfig().loader.skip_ids is not RunConfig().loader.skip_ids


def test_a_class_that_is_no_schema_has_none():
    assert entries(dict) == {}
    assert entries(dataclasses.make_dataclass("Foreign", [("a", int)]))["a"].range is None
