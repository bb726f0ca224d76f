"""Runs with a planted fault, and healthy ones, as they were recorded: the rules find in each what was planted.

`benchmarks/diagnosis.py --traces tests/traces` records them anew.
"""

import gzip
import json
from pathlib import Path

import pytest

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import DOUBTS, EVENT_IDS, run_rules
from wellfed.explain.diagnosis.thresholds import WORTH_FRAC

TRACES = Path(__file__).parents[2] / "traces"
FILES = sorted(TRACES.glob("*/*.json.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name.removesuffix('.json.gz')}")
def test_what_was_planted_is_said_first(path: Path, tmp_path: Path) -> None:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    for name, text in trace["files"].items():
        (tmp_path / name).write_text(text)
    expected = trace["expected"]
    findings = run_rules(Evidence.read(tmp_path))
    ids, planted = [finding.id for finding in findings], {expected["cause"], *expected["also"]}
    causes = [finding for finding in findings if not finding.is_note]
    assert all(finding.change or finding.advice for finding in causes), "no way out"
    if expected["cause"] in ("healthy", "unknown"):
        assert (ids[0], causes) == ("healthy", [])
    elif expected["is_note"] or expected["cause"] in DOUBTS:
        assert planted & {*ids[1:]}
        assert (ids[0], causes) == ("healthy", [])
    elif causes[0].time_lost_frac < WORTH_FRAC and causes[0].id not in EVENT_IDS:
        assert ids[0] == "healthy"
        assert causes[0].id in planted
    else:
        assert ids[0] in planted


def test_readings_that_are_too_slow_for_the_swing_of_the_steps_give_the_gpu_no_period(tmp_path: Path) -> None:
    """Four workers finish together every 243 ms; ten readings a second seemed to swing with a period of 1.1 s."""
    trace = json.loads(gzip.decompress((TRACES / "gpu" / "lockstep_gpu_pictures.json.gz").read_bytes()))
    for name, text in trace["files"].items():
        (tmp_path / name).write_text(text)
    evidence = Evidence.read(tmp_path)
    assert evidence.swings.of_gpus == {}
