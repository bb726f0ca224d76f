"""What findings of recorded runs make of a search: what a loader, memory or GPU knob removes is followed."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.record.entries import RunRecord
from wellfed.study.rows import Row
from wellfed.study.tune.moves import TuneMachine
from wellfed.study.tune.trial import Change, TuneTrial
from wellfed.study.tune.walk import Walk

ANY: Any = None
TRACES = Path(__file__).parents[2] / "traces"
LEADS = {
    "cpu/too_few_workers_table": ("too_few_workers", "loader.num_workers=4"),
    "cpu/loading_in_main_process_table": ("loading_in_main_process", "loader.backend=auto"),
    "cpu/restarted_workers_table": ("restarted_workers", "loader.persistent_workers=true"),
    "cpu/uneven_batches_table": ("uneven_batches", "loader.prefetch_factor=6"),
    "cpu/workers_take_the_cpu_table": ("workers_take_the_cpu", "loader.num_workers=1"),
    "simulated/slow_copy_table": ("slow_copy", "loader.pin_memory=true"),
    "simulated/small_batch_table": ("small_batch", "memory.micro_batch=32"),
    "simulated/memory_unused_table": ("memory_unused", "memory.checkpoint_activations=false"),
    "simulated/launch_bound_table": ("launch_bound", "gpu.compile=reduce-overhead"),
}
ADVICE = {
    "cpu/frequent_logging_table": "trainer.log_every_steps=200",
    "cpu/loss_blows_up_table": "trainer.gradient_clip=1.0",
    "simulated/tensor_cores_idle_table": "gpu.precision=bf16-mixed gpu.tf32=true",
}


def begun_with(name: str, tmp_path: Path) -> Walk:
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    for file, text in trace["files"].items():
        (tmp_path / file).write_text(text)
    evidence = Evidence.read(tmp_path)
    record = replace(evidence.record, findings=[finding.entry() for finding in run_rules(evidence)])
    row = Row("p", "trial", (), "ok", 1, samples_per_s=100.0, ci95=(99.0, 101.0), seconds=1.0)
    walk = Walk(9, 99.0, TuneMachine(evidence.cores or 1.0, evidence.on_gpu))
    walk.judge(walk.next() or Change((), ""), TuneTrial(row, record), ANY)
    return walk


@pytest.mark.parametrize("name", LEADS)
def test_the_first_finding_leads(name: str, tmp_path: Path) -> None:
    change = begun_with(name, tmp_path).next()
    assert change is not None
    assert (change.finding, change.overrides[0]) == LEADS[name]


@pytest.mark.parametrize("name", ADVICE)
def test_what_tune_does_not_turn_is_advice(name: str, tmp_path: Path) -> None:
    search = begun_with(name, tmp_path)
    assert ADVICE[name] in [" ".join(advice["overrides"]) for advice in search.advice]
    change = search.next()
    assert change is None or change.finding is None


@pytest.mark.parametrize(
    "name", ["cpu/whole_batches_table", "simulated/workers_on_card_table", "simulated/on_card_table"]
)
def test_a_run_that_is_fed_is_asked_for_no_other_loader(name: str, tmp_path: Path) -> None:
    search = begun_with(name, tmp_path)
    while (change := search.next()) is not None:
        assert not any(word.startswith("loader.backend") for word in change.turned), change
        search.judge(change, TuneTrial(Row("p", "trial", (), "failed", 1, seconds=1.0), RunRecord("p")), ANY)
