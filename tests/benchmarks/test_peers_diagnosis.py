"""The faults that `benchmarks/peers_diagnosis.py` plants in scripts, and one of them under ``wellfed watch``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns the module; its scripts import one another by their bare names."""
    monkeypatch.setattr(sys, "path", [str(PEERS), str(PEERS.parent), *sys.path])
    before = set(sys.modules)
    import peers_diagnosis

    yield peers_diagnosis
    for name in {"peers_diagnosis", "planted", "parts"} - before:
        sys.modules.pop(name, None)


def test_24_faults_each_with_an_expectation(benchmark: Any) -> None:
    kinds = {"input", "copy", "between", "compute", "start", "none"}
    assert len(benchmark.FAULTS) == 24
    assert len(benchmark.ALL) == 31  # two of a simulated card, three of a GPU, and two healthy scripts
    for fault in benchmark.ALL.values():
        assert fault.kinds, fault
        assert set(fault.kinds) <= kinds
        assert fault.says
        assert fault.causes
        benchmark.Settings(**fault.settings)  # its fields exist
    assert {"none", "compute"} == set(benchmark.HEALTHY[0].kinds)


def test_a_remark_on_the_machine_is_no_verdict(benchmark: Any) -> None:
    busy, waits = {"id": "busy_machine", "evidence": {}}, {"id": "unexplained", "evidence": {"wait_frac": 0.3}}
    assert benchmark.our_kind([busy, waits], None) == ("input", waits)
    assert benchmark.our_kind([busy], {"compute_frac": 0.95}) == ("compute", None)
    assert benchmark.our_kind([{"id": "unknown", "evidence": {}}], {"compute_frac": 0.5})[0] == "none"


def test_typed_advice_changes_what_it_names(benchmark: Any) -> None:
    before = benchmark.Settings(validate_every=5)
    after = benchmark.changed(before, "DataLoader(num_workers=3, persistent_workers=True); validation every 100 steps")
    assert (after.workers, after.persistent, after.validate_every) == (3, True, 100)
    assert benchmark.changed(before, "Increase workers, prefetch, or storage throughput.") == before


def test_the_page_shows_the_newest_records(benchmark: Any) -> None:
    assert benchmark.PAGE.read_text() == benchmark.page(), "python benchmarks/peers_diagnosis.py --page"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["plain", "lightning"])
def test_a_planted_fault_is_found(script: str, benchmark: Any, tmp_path: Path) -> None:
    machine, fault = benchmark.Machine(tmp_path, Path("traceml")), benchmark.ALL["gradient_statistics"]
    verdict = machine.run("wellfed", fault, script, benchmark.SCRIPTS[script], ["--fault", fault.name])
    assert verdict.is_right, verdict
    assert verdict.names_cause
