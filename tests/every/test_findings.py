"""Overrides of findings against the configuration: what is printed to be typed composes behind the run's own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wellfed.config.compose import compose
from wellfed.explain.diagnosis import rules
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules

TRACES = Path(__file__).parents[1] / "traces"
OURS = ("gpu", "loader", "memory", "trainer")
"""Groups of the engine; the planted workload is not there to be composed."""
Change = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Id of a finding, what the run was started with, what the finding adds."""
WITHOUT_OVERRIDES = {
    *("healthy", "too_few_steps", "machine_was_slower", "unexplained", "slow_start", "clocks_limited"),
    *("cpu_bound_loading", "slow_samples", "slow_callbacks", "synchronisation", "memory_creeps", "utilisation_swings"),
    *("unknown", "busy_machine", "busy_thread", "contended_loading", "step_time_trend"),
    *("few_threads", "many_tensors", "wide_batches"),
    *("slow_handover", "data_parallel"),  # as planted here: without fetch, with one device
}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[Change]:
    """Of every recorded run."""
    return [*changes_of(tmp_path_factory.mktemp("traces"))]


def changes_of(folder: Path) -> Iterator[Change]:
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
            if finding.change:
                yield finding.id, own, finding.change


def test_every_rule_with_overrides_has_a_recorded_run(changes: list[Change]) -> None:
    files = {path.stem for path in Path(rules.__path__[0]).rglob("*.py")} - {"__init__"}
    with_overrides = {one for one, _, _ in changes}
    assert with_overrides | WITHOUT_OVERRIDES == files


@pytest.mark.parametrize("starts", ["one", pytest.param("all", marks=pytest.mark.slow)])
def test_every_override_composes(changes: list[Change], starts: str) -> None:
    """Of each finding with each set of knobs: behind one recorded start, or behind all."""
    seen = set()
    for one, own, change in changes:
        key = (one, *(own if starts == "all" else ()), *(word.partition("=")[0] for word in change))
        if key not in seen:
            seen.add(key)
            composed = compose([*own, *change])
            for word in change:
                knob, _, value = word.partition("=")
                if "." in knob:
                    assert str(_value(composed.resolved, knob)).lower() == value.replace("null", "none"), word
    assert len(seen) >= 15


def _value(config: Any, knob: str) -> Any:
    for name in knob.split("."):
        config = config[name]
    return getattr(config, "value", config)
