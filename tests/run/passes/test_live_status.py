"""The figures below the bar, and the one early warning, by the same rules as at the end."""

from pathlib import Path

import pytest

from tests.kit.machines import H200
from tests.plan.test_decide import config, planned
from wellfed.config.compose import compose
from wellfed.config.schema import Accelerator, Backend
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.timing.step_clock import StepRow
from wellfed.record import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.gpu_monitor import NodeMessage
from wellfed.run.passes import live_status
from wellfed.run.passes.live_status import WARN_S, WARN_STEPS, LiveStatus

IDLE = {"cpu_pct": 100.0, "others_cpu_pct": 0.0, "rss_gib": 1.5}


class Training:
    """A training of made steps and readings, with real books."""

    def __init__(self, folder: Path, *, on_gpu: bool = True, workers: int = 0, telemetry: bool = True) -> None:
        accelerator = Accelerator.gpu if on_gpu else Accelerator.cpu
        backend = Backend.processes if workers else Backend.inline
        self.plan = planned(
            config(trainer={"accelerator": accelerator}, loader={"backend": backend, "num_workers": workers})
        )
        composed = compose(["logger=none", f"telemetry.enabled={str(telemetry).lower()}"])
        self.books = Bookkeeper(RunRecord.start("r"), folder, composed.config)
        self.books.record.machine = {"cpu_quota_cores": 4.0, "host_cores": 4}
        self.books.planned(self.plan)
        self.books.watching(H200, self.plan)
        self.now_s, self.step = 0.0, 0
        self.live = LiveStatus(self.books, self.plan, "images", lambda: self.now_s)

    def steps(self, number: int, *, wait_ms: float = 0.0, build_ms: float = 5.0) -> None:
        for _ in range(number):
            self.step += 1
            copy_ms = 0.0 if self.plan.on_gpu else None
            row = StepRow(
                self.step, self.step * 0.1, 0, 64, 64, 1, wait_ms, copy_ms, 10.0, 0.1, wait_ms, self.step <= 3,
                build_ms, build_ms,
            )  # fmt: skip
            self.books.journal.steps([row])

    def read(self, times: int = 5, host: dict[str, float] = IDLE, **gpus: dict[str, float]) -> None:
        readings = [(self.step, "train", HOST, host)]
        readings += [(self.step, "train", int(gpu.removeprefix("gpu")), values) for gpu, values in gpus.items()]
        for _ in range(times):
            self.books.take_node_message(NodeMessage(0, tuple(readings)))  # type: ignore[arg-type]

    def shown(self) -> list[tuple[str, str]]:
        return [(part.plain, str(part.style)) for part in self.live.parts()]


def test_a_starved_gpu_is_red_and_a_fed_one_green(tmp_path: Path) -> None:
    training = Training(tmp_path)
    assert training.shown() == []
    training.steps(20, wait_ms=52.6)
    training.read(gpu0={"util_pct": 3.0, "power_w": 69.0})
    assert training.shown() == [("GPU 3 %", "red"), ("wait 84 %", "red"), ("69 W", "")]
    training.steps(60)
    training.read(95, gpu0={"util_pct": 99.0, "power_w": 300.0})
    assert training.shown() == [("GPU 94 %", "green"), ("wait 0 %", "green"), ("300 W", "")]
    assert training.live.rate() == "6,337 images/s"
    training.steps(200, wait_ms=128_000)
    assert training.live.rate() == "0.5 images/s"


def test_of_several_gpus_the_idlest_has_the_colour_and_a_lost_one_comes_first(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.read(gpu0={"util_pct": 90.0, "power_w": 100.0}, gpu1={"util_pct": 60.0, "power_w": 100.0})
    assert training.shown() == [("2 GPUs 60-90 %", "yellow"), ("200 W", "")]
    training.books.event("gpu_lost", gpu=1)
    assert training.shown()[0] == ("GPU 1 lost", "bold red")


def test_without_a_gpu_it_is_what_the_host_shows(tmp_path: Path) -> None:
    training = Training(tmp_path, on_gpu=False)
    training.steps(20, wait_ms=1.0)
    training.read(host={"cpu_pct": 150.0, "others_cpu_pct": 220.0, "rss_gib": 1.5}, gpu0={"util_pct": 70.0})
    assert training.shown() == [
        *(("CPU 1.5 of 4 cores", ""), ("other programs 2.2", "yellow"), ("mem 1.50 GiB", "")),
        ("wait 9 %", "yellow"),
    ]


def test_without_telemetry_the_waiting_is_left(tmp_path: Path) -> None:
    training = Training(tmp_path, telemetry=False)
    training.steps(20, wait_ms=10.0)
    assert training.shown() == [("wait 50 %", "red")]


def test_a_starved_run_is_warned_of_once_with_what_to_type(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.steps(3 + WARN_STEPS - 1, wait_ms=50.0, build_ms=50.0)
    training.read()
    assert training.live.warning() is None
    training.steps(1, wait_ms=50.0, build_ms=50.0)
    told = training.live.warning()
    assert told is not None
    assert told.startswith(f"After {WARN_STEPS} steps: STARVED. 83.2 % of each step waits for data: ")
    assert " For the next run: loader." in told
    assert "predicted)." in told
    training.steps(999, wait_ms=50.0, build_ms=50.0)
    training.now_s = 10 * WARN_S
    assert training.live.warning() is None


def test_slow_first_steps_and_workers_that_start_accuse_nobody(tmp_path: Path) -> None:
    training = Training(tmp_path, workers=4)
    training.steps(7, wait_ms=5000.0)
    training.read()
    training.steps(WARN_STEPS)
    training.now_s = 2 * WARN_S
    assert [training.live.warning() for _ in range(3)] == [None, None, None]
    training.steps(500)
    assert training.live.warning() is None


def test_steps_that_are_long_are_judged_after_a_minute(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.steps(23, wait_ms=50.0, build_ms=50.0)
    training.now_s = WARN_S - 1
    assert training.live.warning() is None
    training.now_s = WARN_S
    told = training.live.warning()
    assert told is not None
    assert told.startswith("After 20 steps: STARVED. ")


def test_a_run_that_starves_later_is_seen_by_the_second_look(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.steps(3 + WARN_STEPS)
    training.read()
    assert training.live.warning() is None
    training.steps(300, wait_ms=50.0, build_ms=50.0)
    assert training.live.warning() is None
    training.now_s = WARN_S
    assert "STARVED" in (training.live.warning() or "")


def test_where_others_may_take_the_cores_it_waits_for_readings(tmp_path: Path) -> None:
    training = Training(tmp_path, on_gpu=False)
    training.steps(60, wait_ms=50.0, build_ms=50.0)
    assert training.live.warning() is None
    training.read(host={"cpu_pct": 200.0, "others_cpu_pct": 200.0, "rss_gib": 1.0})
    told = training.live.warning()
    assert told is not None
    assert told.startswith("After 57 steps: STARVED. ")
    assert "times as fast" not in told
    assert "For the next run: Make it cheaper" in told


@pytest.mark.parametrize("factor", [None, 1.13, 100.0])
def test_what_an_earlier_process_has_measured_accuses_nobody(tmp_path: Path, factor: float | None) -> None:
    training = Training(tmp_path)
    training.books.record.ceiling = None if factor is None else {"samples_per_s": factor * 64e3 / 10.52}
    training.steps(300, wait_ms=0.42)
    training.read()
    training.now_s = WARN_S
    assert [training.live.warning(), training.live.warning()] == [None, None]


def test_a_faulty_rule_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(evidence: Evidence) -> list[Finding]:
        raise ZeroDivisionError

    monkeypatch.setattr(live_status, "run_rules", fails)
    training = Training(tmp_path)
    training.steps(100)
    training.read()
    assert training.live.warning() is None
