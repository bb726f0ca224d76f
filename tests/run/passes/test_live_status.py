"""The figures below the bar."""

from pathlib import Path

from tests.kit.composed import compose
from tests.kit.machines import H200
from tests.plan.test_decide import config, planned
from wellfed.config.schema import Accelerator, Backend
from wellfed.observe.telemetry.series import HOST, Sample
from wellfed.observe.timing.step_clock import StepRow
from wellfed.record.entries import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.passes.live_status import LiveStatus

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
        self.step = 0
        self.live = LiveStatus(self.books, self.plan, "images")

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
            self.books._take([Sample(self.books.journal.time_s(), *one) for one in readings])  # type: ignore

    def shown(self) -> list[tuple[str, str]]:
        return [(part.plain, str(part.style)) for part in self.live.parts()]


def test_a_starved_gpu_is_red_and_a_fed_one_green(tmp_path: Path) -> None:
    training = Training(tmp_path)
    assert training.shown() == []
    training.steps(20, wait_ms=52.6)
    training.read(gpu0={"util_pct": 3.0, "power_w": 69.0})
    assert training.shown() == [("GPU 3 %", "red"), ("wait 84 %", "red")]
    training.steps(60)
    training.read(95, gpu0={"util_pct": 99.0, "power_w": 300.0})
    assert training.shown() == [("GPU 94 %", "green"), ("wait 0 %", "green")]
    assert training.live.rate() == "6,337 images/s"
    training.steps(200, wait_ms=128_000)
    assert training.live.rate() == "0.5 images/s"


def test_of_several_gpus_the_idlest_has_the_colour(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.read(gpu0={"util_pct": 90.0, "power_w": 100.0}, gpu1={"util_pct": 60.0, "power_w": 100.0})
    assert training.shown() == [("2 GPUs 60-90 %", "yellow")]


def test_without_a_gpu_the_waiting_is_left(tmp_path: Path) -> None:
    training = Training(tmp_path, on_gpu=False)
    training.steps(20, wait_ms=1.0)
    training.read(host={"cpu_pct": 150.0, "others_cpu_pct": 220.0, "rss_gib": 1.5}, gpu0={"util_pct": 70.0})
    assert training.shown() == [("wait 9 %", "yellow")]


def test_without_telemetry_the_waiting_is_left(tmp_path: Path) -> None:
    training = Training(tmp_path, telemetry=False)
    training.steps(20, wait_ms=10.0)
    assert training.shown() == [("wait 50 %", "red")]
