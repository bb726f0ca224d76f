"""Every finding that is no note has overrides or advice; those of recorded runs are in test_traces."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.explain.test_texts_of_findings import MADE
from tests.kit.evidence_of import evidence
from tests.kit.loader_evidence import fed_by
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules

TRACES = sorted((Path(__file__).parents[2] / "traces").glob("*/*.json.gz"))[::4]
REFUSED = {"refused": ["loader.num_workers"]}


def without_way_out(given: Evidence) -> list[str]:
    return [one.id for one in run_rules(given) if not (one.is_note or one.change or one.advice)]


def of_own_loader(given: Evidence) -> Evidence:
    """The same run with a loader of the user that no knob can change."""
    plan = {**given.record.plan, "loader.backend": {"value": "own", "because": "", "source": "set"}}
    record = replace(given.record, plan=plan, **REFUSED)  # type: ignore[arg-type]
    return replace(given, record=record)


def test_findings_have_one_with_a_loader_of_the_user(tmp_path: Path) -> None:
    for path in TRACES:
        for name, text in json.loads(gzip.decompress(path.read_bytes()))["files"].items():
            (tmp_path / name).write_text(text)
        assert without_way_out(of_own_loader(Evidence.read(tmp_path))) == [], path
    for given in MADE.values():
        assert without_way_out(given) == without_way_out(of_own_loader(given)) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (fed_by(0, build_ms=30.0, cpu_frac=0.9, backend="own", **REFUSED), "num_workers=4"),
        (fed_by(1, build_ms=30.0, cpu_frac=0.9, backend="own", **REFUSED), "num_workers=4"),
    ],
)
def test_a_loader_of_the_user_has_its_own_arguments_as_advice(given: Evidence, words: str) -> None:
    first = run_rules(given)[0]
    assert first.change == ()
    assert words in first.advice


@pytest.mark.parametrize(
    "record",
    [
        {"status": "oom", "memory": {"may_lower": []}, "error": {"kind": "oom", "message": "", "advice": ""}},
        {"status": "failed", "error": {"kind": "host_oom", "message": "", "advice": ""}},
        {"events": [{"kind": "step_down", "step": 3, "time_s": 1.0}]},
        {"events": [{"kind": "nan", "step": 3, "time_s": 1.0}], "refused": {"trainer.gradient_clip": ""}},
    ],
)
def test_events_have_advice_where_no_knob_helps(record: dict[str, Any]) -> None:
    first = run_rules(evidence(plan={"memory.micro_batch": 1}, **record))[0]
    assert first.change == ()
    assert first.advice
