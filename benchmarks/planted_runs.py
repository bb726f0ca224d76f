"""Runs `src/train.py` with a planted fault, on the CPU or on a card, and judges what the run has left."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from planted_faults import SHAPES, Fault, Healthy, Shape, Where
from planted_workload import SIGNALS
from warm_python import WarmPython

from tests.fake_cuda.machine import SITE, Cards, compile_driver, machine_environment
from tests.fake_nvml.driver import FakeDriver
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.record.entries import FindingEntry, RunRecord

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120
CARD = {
    **{"mib": 8192, "context_mib": 300, "slowdown": 3.0, "launch_us": 5.0, "copy_gbps": 12.0, "pageable_gbps": 4.0},
    **{"tflops": 0.001, "tensor_tflops": 0.004, "dram_gbps": 1.0, "sms": 16, "kernel_us": 20.0},
}
"""A simulated card of a run, unless its fault says otherwise."""
BURN = "while True: pass"


@dataclass
class Run:
    """One run of `src/train.py` and what it left."""

    folder: Path | None
    command: str
    code: int
    seconds: float
    printed: str
    findings: list[FindingEntry] = field(default_factory=list)
    judged_ms: float = 0.0

    @cached_property
    def evidence(self) -> Evidence | None:
        """Evidence for the rules; None if the run left no record."""
        return None if self.folder is None else Evidence.read(self.folder)

    @cached_property
    def rate(self) -> float | None:
        """Returns `rate_of` this run."""
        return None if self.evidence is None else rate_of(self.evidence)

    @property
    def first(self) -> str:
        """Id of what is said first; how the run ended where nothing is."""
        return self.findings[0]["id"] if self.findings else f"none (exit code {self.code})"

    @property
    def notes(self) -> list[str]:
        """Ids of what is said beside the causes."""
        return [each["id"] for each in self.findings[1:] if each["severity"] == "info"]


def rate_of(evidence: Evidence) -> float | None:
    """Returns samples/s from the first step after the warm-up to the last, all that came between included."""
    samples = evidence.steps.column("samples")
    wall_ms = (evidence.steps.mean_ms or 0.0) * len(samples) + float(evidence.steps.gap_ms.sum())
    return 1e3 * float(samples.sum()) / wall_ms if len(samples) > 1 and wall_ms else None


class Machine:
    """Runs the commands, on the CPU or with a simulated card; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self._number = folder, contextlib.ExitStack(), 0
        self._pythons: dict[Where, WarmPython] = {}
        configs = folder / "configs" / "workload"
        configs.mkdir(parents=True)
        for shape in SHAPES:
            (configs / f"{shape.name}.yaml").write_text(shape.yaml)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @cached_property
    def _driver(self) -> FakeDriver:
        compile_driver()
        return FakeDriver(Path("cc"), self._folder)

    def run(self, shape: Shape, planted: Fault | Healthy, overrides: Sequence[str]) -> Run:
        """Trains once; the run's folder holds everything that it wrote."""
        self._number += 1
        place = self._folder / f"{self._number:03d}_{planted.kind}_{shape.name}"
        place.mkdir()
        typed = [f"workload={shape.name}", f"trainer.max_steps={planted.steps}", *overrides]
        fixed = [
            *("--config-dir", str(self._folder / "configs")),
            *("logger=none", f"paths.log_dir={place}/logs", f"paths.cache_dir={self._folder}/cache"),
            *("telemetry.interval_s=0.1", f"trainer.accelerator={'cpu' if planted.where == 'cpu' else 'gpu'}"),
        ]
        if isinstance(planted, Fault) and planted.burners:
            fixed.append(f"++workload.model.last_step={planted.steps}")
        variables = {SIGNALS: str(place)} | self._variables(shape, planted, place)
        printed = place / "printed.txt"
        python = self._python(planted.where)
        with _burning(planted.burners if isinstance(planted, Fault) else 0, place):
            ended = python.run(
                [str(ROOT / "src" / "train.py"), *fixed, *typed],
                printed,
                variables=variables,
                folder=place,
                timeout_s=TIMEOUT_S,
            )
        (place / "typed.txt").write_text(" ".join(typed) + "\n")
        records = list(place.glob("logs/*/runs/*/run.json"))
        run = Run(
            records[0].parent if records else None,
            " ".join(typed),
            ended.code,
            ended.seconds,
            printed.read_text(errors="replace"),
        )
        if run.folder is not None:
            began_s = time.perf_counter()
            run.findings = [finding.entry() for finding in run_rules(Evidence.read(run.folder))]
            run.judged_ms = 1e3 * (time.perf_counter() - began_s)
            run.findings = RunRecord.read(run.folder).findings or run.findings
        return run

    def _python(self, where: Where) -> WarmPython:
        if where not in self._pythons:
            path = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
            # NVML says whether there is a card: a process that has asked CUDA can't be forked.
            variables = {"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            if where == "simulated":
                path.insert(0, str(SITE))
                variables = machine_environment(self._driver, self._folder, Cards()) | {"FAKE_CUDA_LATER": "1"}
            variables["OMP_NUM_THREADS"] = "1"  # two that wait for one another on a busy core take ten times as long
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
            self._pythons[where] = self._stack.enter_context(WarmPython(variables))
        return self._pythons[where]

    def _variables(self, shape: Shape, planted: Fault | Healthy, place: Path) -> dict[str, str]:
        if planted.where != "simulated":
            return {}
        asked = {**CARD, **planted.card}
        for knob, steps in (("copy_gbps", "pinned_steps"), ("pageable_gbps", "pageable_steps")):
            if steps in asked:
                asked[knob] = shape.batch_bytes / (asked.pop(steps) * 1e6 * shape.step_ms)
        cards = Cards(**asked)
        found = machine_environment(self._driver, place, cards)
        return {name: value for name, value in found.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}


@contextlib.contextmanager
def _burning(number: int, place: Path) -> Iterator[None]:
    """Runs processes that take a core each while the run makes steps."""
    ended = threading.Event()

    def burn() -> None:
        while not (place / "begun").exists():
            if ended.wait(0.01):
                return
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(number)]
        while not (place / "over").exists() and not ended.wait(0.01):
            pass
        for process in burning:
            process.kill()
            process.wait()

    watching = threading.Thread(target=burn)
    if number:
        watching.start()
    try:
        yield
    finally:
        ended.set()
        if number:
            watching.join()


_TABLES = ("steps.csv", "telemetry.csv", "metrics.csv")
_OF_THIS_MACHINE = {"git": None, "host_name": "", "boot_id": "", "pid": 0, "overrides": [], "artifacts": {}}


def save_trace(run: Run, planted: Fault | Healthy, path: Path) -> None:
    """Keeps what the rules are given in one file, for tests/explain/diagnosis/test_traces.py, and what must be said."""
    assert run.folder is not None
    record = json.loads((run.folder / "run.json").read_text()) | _OF_THIS_MACHINE
    record["config"].pop("paths", None)
    record["findings"], record["metrics"] = [], {}
    texts = {"run.json": json.dumps(record).replace(f"{ROOT}/", "")}
    for name in _TABLES:
        if (run.folder / name).exists():
            texts[name] = "\n".join(map(_shortened, (run.folder / name).read_text().splitlines())) + "\n"
    cause = planted.cause if isinstance(planted, Fault) else "healthy"
    expected = {
        "cause": cause,
        "also": list(getattr(planted, "also", ())),
        "is_note": getattr(planted, "is_note", False),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"expected": expected, "files": texts}).encode(), mtime=0))


def _shortened(row: str) -> str:
    """Numbers of six digits are enough."""
    return ",".join(f"{float(cell):.6g}" if "." in cell and _is_number(cell) else cell for cell in row.split(","))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
