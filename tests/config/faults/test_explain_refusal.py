import pytest

from wellfed.config.faults.explain_refusal import explain, nearest_knob
from wellfed.config.schema import EvaluateConfig, RunConfig


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lodaer", "loader"), ("gpus", "gpu"), ("sede", "seed"), ("num_workers", "loader.num_workers"), ("zzz", None)],
)
def test_names_without_a_dot(name, meant):
    assert nearest_knob(RunConfig, name) == meant


def test_unknown_knobs():
    assert explain(RunConfig, "loader.num_worker") == ("no such knob.", "Did you mean loader.num_workers?")
    assert explain(RunConfig, "workload.schedule.zzz")[1] == (
        "workload.schedule has name, warmup_steps, min_lr_frac, interval, monitor."
    )
    assert explain(RunConfig, "no.such.place")[1] == "All knobs: python src/train.py --cfg job"
    assert explain(EvaluateConfig, "zzz")[1] == "There are checkpoint, accelerator, paths."


def test_wrong_types():
    assert explain(RunConfig, "gpu.tf32", ValueError("x"))[0] == "must be true or false."
    error = ValueError("Invalid value 'treads', expected one of [auto]")
    assert explain(RunConfig, "loader.backend", error) == (
        "must be one of auto, torch, inline, threads, processes, own.",
        "Did you mean loader.backend=threads?",
    )


def test_a_chained_error_gives_the_reason():
    error = ValueError("Error merging override")
    error.__cause__ = ValueError("Value 'a' of type 'str' could not be converted to Integer\n    full_key: x")
    problem, _ = explain(RunConfig, "workload.model", error)
    assert problem.endswith("Value 'a' of type 'str' could not be converted to Integer.")


def test_a_list_says_what_its_entries_are():
    error = ValueError("Invalid value assigned: str is not a ListConfig, list or tuple.")
    assert explain(RunConfig, "loader.skip_ids[0]", error)[0] == "must be a list [..] of whole numbers >= 0."
    problem, way_out = explain(RunConfig, "sweep.retry", error)
    assert problem == "must be a list [..] of ok, oom, failed, killed, timeout."
    assert "e.g. [oom,failed]" in way_out


def test_free_nodes_have_no_knobs():
    problem, way_out = explain(RunConfig, "workload.model.dim", ValueError("first line\nsecond"))
    assert (problem, way_out) == ("does not fit: first line.", "")
