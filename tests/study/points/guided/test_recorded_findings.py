"""What findings of recorded runs make of a search: what a loader, memory or GPU knob removes is followed."""

import gzip
import json
from pathlib import Path

import pytest

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.study.points.guided.change import Change, TuneTrial
from wellfed.study.points.guided.moves import TuneMachine
from wellfed.study.points.guided.propose import GuidedPoints
from wellfed.study.points.guided.steps import TuneBudget

TRACES = Path(__file__).parents[3] / "traces"
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


def begun_with(name: str, tmp_path: Path) -> GuidedPoints:
    trace = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    for file, text in trace["files"].items():
        (tmp_path / file).write_text(text)
    evidence = Evidence.read(tmp_path)
    record = evidence.record
    start = TuneTrial(
        *("ok", 100.0, (99.0, 101.0), 1.0, None),
        [finding.entry() for finding in run_rules(evidence)],
        *(record.plan, record.config, record.time, record.loading),
    )
    search = GuidedPoints(TuneBudget(9, 99.0), TuneMachine(evidence.cores or 1.0, evidence.on_gpu))
    search.ended(search.next() or Change((), ""), start)
    return search


@pytest.mark.parametrize("name", LEADS)
def test_the_first_finding_leads(name: str, tmp_path: Path) -> None:
    change = begun_with(name, tmp_path).next()
    assert change is not None
    assert (change.finding, change.overrides[0]) == LEADS[name]


@pytest.mark.parametrize("name", ADVICE)
def test_what_tune_does_not_turn_is_advice(name: str, tmp_path: Path) -> None:
    search = begun_with(name, tmp_path)
    assert ADVICE[name] in [" ".join(advice.overrides) for advice in search.advice]
    change = search.next()
    assert change is None or change.finding is None


@pytest.mark.parametrize(
    "name", ["cpu/whole_batches_table", "simulated/workers_on_card_table", "simulated/on_card_table"]
)
def test_a_run_that_is_fed_is_asked_for_no_other_loader(name: str, tmp_path: Path) -> None:
    search = begun_with(name, tmp_path)
    while (change := search.next()) is not None:
        assert not any(word.startswith("loader.backend") for word in change.turned), change
        search.ended(change, TuneTrial("failed", seconds=1.0))
