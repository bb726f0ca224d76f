"""Findings of recorded runs: their overrides compose after the run's own."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wellfed.config.compose import compose
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules

TRACES = Path(__file__).parents[1] / "traces"
OURS = ("gpu", "loader", "memory", "trainer")
"""Groups of the engine; the planted workload is not there to be composed."""
Found = tuple[tuple[str, ...], tuple[str, ...]]
"""Overrides of a run, and those of one of its findings."""


def found_in(folder: Path, every: int) -> Iterator[Found]:
    default = compose().resolved
    for path in sorted(TRACES.glob("*/*.json.gz"))[::every]:
        trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        for name, text in trace["files"].items():
            (folder / name).write_text(text)
        evidence = Evidence.read(folder)
        own = tuple(
            f"{group}.{knob}={str(value).lower() if isinstance(value, bool) else value}"
            for group in OURS
            for knob, value in evidence.record.config[group].items()
            if knob in default[group] and isinstance(value, bool | int | float | str) and value != default[group][knob]
        )
        for finding in run_rules(evidence):
            yield own, finding.change


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_every_override_composes(tmp_path: Path, every: int) -> None:
    """Each set of knobs is added to the overrides of a recorded run; if all are read, to those of each run."""
    seen = set()
    for own, change in found_in(tmp_path, every):
        key = (*(own if every == 1 else ()), *(word.partition("=")[0] for word in change))
        if change and key not in seen:
            seen.add(key)
            composed = compose([*own, *change])
            for word in change:
                knob, _, value = word.partition("=")
                if "." in knob:
                    assert str(_value(composed.resolved, knob)).lower() == value.replace("null", "none"), word
    assert len(seen) >= 5


def _value(config: Any, knob: str) -> Any:
    for name in knob.split("."):
        config = config[name]
    return getattr(config, "value", config)
