"""GPUWatch beside a plain loop: with the real pynvml on the fake driver, and without NVML."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario
from tests.kit.tables import rows_of
from tests.watch.watching import notes_of, record_of
from wellfed import GPUWatch
from wellfed.explain.diagnosis.script_words import NO_STEP
from wellfed.observe.nvml.session import NO_LIBRARY, NvmlError

TWO = Scenario(gpus=[FakeGpu("GPU-aaaa", util=30), FakeGpu("GPU-bbbb", util=90)])


class Loader:
    """Yields batches slowly."""

    num_workers = 0

    def __init__(self, number: int, build_s: float = 0.0) -> None:
        self._number, self._build_s = number, build_s

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[int]:
        for number in range(self._number):
            time.sleep(self._build_s)
            yield number


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which gets the run folders."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def two_cards(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with fake_driver.load(TWO):
        yield


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise NvmlError("import", NO_LIBRARY)

    monkeypatch.setattr("wellfed.observe.nvml.session.load_pynvml", absent)
    monkeypatch.setattr("wellfed.observe.hardware.detect.NvmlSession.__enter__", lambda self: absent())


@pytest.mark.usefixtures("two_cards")
def test_steps_are_timed_and_gpus_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with GPUWatch("telemetry.csv", interval_s=0.1) as watch:
        seen = []
        for epoch in range(2):
            for number in watch.batches(Loader(20, build_s=0.015)):
                seen.append((epoch, number))
                time.sleep(0.005)
            time.sleep(0.15)  # validation: no step's
    assert seen == [(epoch, number) for epoch in range(2) for number in range(20)]
    summary, record = watch.summary, record_of(folder)
    assert (summary["steps"], summary["warmup_steps"]) == (37, 3)
    assert 0.55 < summary["wait_frac"] < 0.85
    assert summary["copy_frac"] is None
    assert summary["steps_per_s"] < 50
    assert [round(gpu["util_pct"]["mean"]) for gpu in summary["gpus"].values()] == [30, 90]
    assert summary["findings"][0] == "loading_in_main_process"
    assert (record.steps, record.samples, record.epochs, record.status) == (40, 40, 2, "ok")
    err = capsys.readouterr().err
    assert "STARVED" in err
    assert "DataLoader(num_workers=" in err
    written = rows_of(folder / "telemetry.csv")
    assert {row["gpu"] for row in written} == {"-1", "0", "1"}
    assert {row["phase"] for row in written} >= {"train", "validate"}
    assert max(int(row["step"]) for row in written) >= 20  # steps are passed on every 0.2 s


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_steps_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with GPUWatch(interval_s=0.1) as watch:
        for _ in watch.batches(Loader(30)):
            time.sleep(0.002)
    assert "Report " in capsys.readouterr().err
    assert watch.summary["steps"] == 27
    assert watch.summary["gpus"] == {}


@pytest.mark.usefixtures("no_nvml")
class TestLoop:
    def test_batches_are_as_long_as_their_loader_and_can_be_gone_over_again(self) -> None:
        with GPUWatch(quiet=True) as watch:
            batches = watch.batches(Loader(5))
            assert len(batches) == 5  # type: ignore[arg-type]
            assert list(batches) == list(batches) == list(range(5))
            with pytest.raises(TypeError):
                len(watch.batches(iter(range(3))))  # type: ignore[arg-type]
        assert watch.summary["steps"] == 7

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_an_error_goes_on_its_way_and_the_record_is_there(self, error: type[BaseException], folder: Path) -> None:
        def broken() -> Iterator[int]:
            yield from range(30)
            raise error

        with pytest.raises(error), GPUWatch(quiet=True) as watch:
            for _ in watch.batches(broken()):
                pass
        assert watch.summary["steps"] == 27
        assert record_of(folder).status == ("interrupted" if error is KeyboardInterrupt else "failed")

    def test_other_processes_only_train(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("LOCAL_RANK", "1")
        with GPUWatch(folder / "telemetry.csv") as watch:
            assert list(watch.batches(range(3))) == [0, 1, 2]
        assert (watch.summary, list(folder.iterdir())) == ({}, [])

    def test_an_older_file_of_this_kind_is_replaced_and_no_other(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = folder / "new" / "telemetry.csv"
        for _ in range(2):
            with GPUWatch(path, interval_s=0.1, quiet=True):
                time.sleep(0.25)
        times = [float(row["time_s"]) for row in rows_of(path)]
        assert 2 <= len(times) <= 8
        assert times == sorted(times)
        path.write_text("my,precious,data\n1,2,3\n")
        with caplog.at_level(logging.WARNING), GPUWatch(path, quiet=True) as watch:
            list(watch.batches(Loader(10)))
        assert path.read_text() == "my,precious,data\n1,2,3\n"
        assert "holds something else and is left as it is" in caplog.text
        assert watch.summary["steps"] == 7

    def test_an_error_of_ours_harms_nothing(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("wellfed.observe.timing.step_clock.StepClock.got", lambda self: 1 / 0)
        with GPUWatch(quiet=True) as watch:
            assert list(watch.batches(range(10))) == list(range(10))
        (told,) = caplog.messages
        assert "watches no more (ZeroDivisionError" in told

    def test_a_block_without_batches(self, folder: Path) -> None:
        with GPUWatch(quiet=True) as watch:
            list(range(30))
        assert NO_STEP in notes_of(record_of(folder))
        assert watch.summary["findings"] == ["unknown"]

    def test_of_loops_that_run_at_once_the_first_is_timed(self) -> None:
        """Within one another, in turn, or in another thread."""
        with GPUWatch(quiet=True) as watch:
            for number in watch.batches(range(30)):
                if number == 10:
                    list(zip(watch.batches(range(9)), watch.batches(range(9)), strict=True))
                if number == 20:
                    other = threading.Thread(target=lambda: list(watch.batches(range(50))))
                    other.start()
                    other.join()
        assert watch.summary["steps"] == 27


@pytest.mark.parametrize("interval_s", ["x", None, True, [1]])
def test_an_interval_that_is_no_number_is_refused(interval_s: object) -> None:
    with pytest.raises(TypeError, match="must be a number of seconds"):
        GPUWatch(interval_s=interval_s)  # type: ignore[arg-type]
