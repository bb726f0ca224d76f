"""Findings of recorded runs: their overrides compose after the run's own, and the pages show their texts."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.few import slow
from wellfed.config.compose import compose
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules

TRACES = Path(__file__).parents[1] / "traces"
OURS = ("gpu", "loader", "memory", "trainer")
"""Groups of the engine; the planted workload is not there to be composed."""
PAGES = Path(__file__).parents[2] / "docs" / "findings"
ADVICE = Path(__file__).parents[2] / "benchmarks" / "records" / "2026-11-27_advice_followed_cpu.json"
RANKS = Path(__file__).parents[2] / "benchmarks" / "records" / "2026-11-26_planted_rank_faults_cpu.json"
Found = tuple[str, str, tuple[str, ...], tuple[str, ...]]
"""Id of a finding, its line as printed, the overrides of the run, and those of the finding."""
WITHOUT_OVERRIDES = {
    *("healthy", "too_few_steps", "machine_was_slower", "unexplained", "slow_start", "clocks_limited"),
    *("cpu_bound_loading", "slow_samples", "slow_callbacks", "synchronisation", "memory_creeps", "utilisation_swings"),
    *("unknown", "busy_machine", "busy_thread", "contended_loading", "step_time_trend"),
    *("few_threads", "many_tensors", "wide_batches"),
    *("host_straggler", "compute_straggler", "uneven_shares", "slow_gpu", "slow_machine", "uneven_memory"),
    *("slow_handover", "data_parallel"),  # as planted here: without fetch, with one device
    "copy_straggler",  # no run of it with intervals is recorded
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Returns the findings of every recorded run."""
    return [*found_in(tmp_path_factory.mktemp("traces"))]


def found_in(folder: Path) -> Iterator[Found]:
    default = compose().resolved  # what is so anyway need not be typed
    for path in sorted(TRACES.glob("*/*.json.gz")):
        trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        for name, text in trace["files"].items():
            (folder / name).write_text(text)
        evidence = Evidence.read(folder)
        own = tuple(
            f"{group}.{knob}={str(value).lower() if isinstance(value, bool) else value}"
            for group in OURS
            for knob, value in evidence.record.config[group].items()
            if isinstance(value, bool | int | float | str) and value != default[group][knob]
        )
        for finding in run_rules(evidence):
            yield finding.id, f"- {finding.id} ({finding.severity}): {finding.text}", own, finding.change


def test_every_rule_with_overrides_has_a_recorded_run(found: list[Found]) -> None:
    with_overrides = {one for one, _, _, change in found if change}
    assert with_overrides | WITHOUT_OVERRIDES == {path.stem for path in PAGES.glob("*.md")} - {"index"}


@pytest.mark.parametrize("starts", ["one", slow("all")])
def test_every_override_composes(found: list[Found], starts: str) -> None:
    """Each set of knobs is added to the overrides of one recorded run; with ``all``, of each run and finding."""
    seen = set()
    for one, _, own, change in found:
        key = (*((one, *own) if starts == "all" else ()), *(word.partition("=")[0] for word in change))
        if change and key not in seen:
            seen.add(key)
            composed = compose([*own, *change])
            for word in change:
                knob, _, value = word.partition("=")
                if "." in knob:
                    assert str(_value(composed.resolved, knob)).lower() == value.replace("null", "none"), word
    assert len(seen) >= 15


def test_the_pages_show_texts_of_recorded_runs(found: list[Found]) -> None:
    printed = {line for _, line, _, _ in found}
    printed |= {row["says"] for row in json.loads(ADVICE.read_text(encoding="utf-8"))["results"]}
    shown = {}
    for path in sorted(PAGES.glob("*.md")):
        blocks = re.findall(r"^```text\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        shown[path.stem] = [" ".join(block.split()) for block in blocks]
    without = {name for name, texts in shown.items() if not texts} - {"index"}
    assert without == set()
    runs = json.loads(RANKS.read_text(encoding="utf-8"))["results"][1]["runs"]
    printed |= {f"- {run['cause']} ({severity}): {run['said']}" for run in runs for severity in ("high", "medium")}
    assert {name for name, texts in shown.items() if not printed.issuperset(texts)} == set()


def _value(config: Any, knob: str) -> Any:
    for name in knob.split("."):
        config = config[name]
    return getattr(config, "value", config)
