import time

import pytest

from tests.fake_nvml.driver import Hang, Scenario
from tests.kit.watched import Heard, ScriptedSource, h200, until, watched_gpu
from wellfed.observe.telemetry import sampler as sampler_file
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import next_beat
from wellfed.observe.telemetry.series import HOST

NEVER_S = 600.0
"""An interval in which only edges bring rounds."""


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch):
    monkeypatch.setattr(sampler_file, "STOP_S", 0.2)


@pytest.fixture
def heard():
    return Heard()


def sampling(heard, *sources, interval_s=0.005, progress=None, **options):
    sampler = heard.sampler(interval_s=interval_s, progress=progress or Progress(), time_s=lambda: 12.5, **options)
    sampler.add(*sources)
    return sampler


def patient(monkeypatch):
    """The end of a run waits for readings under way as long as it takes."""
    monkeypatch.setattr(sampler_file, "STOP_S", 20.0)


# ---- Samples ----


def test_every_source_is_read_again_and_again(heard):
    progress = Progress(3)
    gpu, host = ScriptedSource(0), ScriptedSource(HOST, name="host")
    with sampling(heard, gpu, host, progress=progress):
        until(lambda: len(heard.of(0)) >= 3 and len(heard.of(HOST)) >= 3)
        assert not gpu.is_closed.is_set()
    first = heard.of(0)[0]
    assert (first.time_s, first.step, first.phase, first.gpu) == (12.5, 3, "start", 0)
    assert [sample.values["x"] for sample in heard.of(HOST)][:3] == [1, 2, 3]
    assert gpu.is_closed.is_set()
    assert host.is_closed.is_set()
    assert heard.events == []


def test_dear_figures_are_read_every_few_seconds(heard):
    now_s = [0.0]

    def a_second():
        now_s[0] += 1.0

    source = ScriptedSource(then=a_second)
    with sampling(heard, source, interval_s=0.001, now_s=lambda: now_s[0]):
        until(lambda: len(source.reads) >= 12)
    assert source.reads[:12] == [True, *[False] * 4, True, *[False] * 4, True, False]


def test_the_next_beat_is_the_first_one_after_now():
    assert next_beat(10.0, 10.0, 0.5) == 10.5
    assert next_beat(10.0, 11.2, 0.5) == 11.5  # missed beats are skipped
    assert next_beat(10.0, 3.0, 0.5) == 10.0
    for number in range(1, 200):  # whole numbers of intervals, where rounding decides
        now_s = 5.0 + 0.3 * number
        assert 0 < next_beat(5.0, now_s, 0.3) - now_s <= 0.3 + 1e-6


# ---- Edges ----


def test_where_training_begins_and_ends_a_round_is_taken_for_what_is_over(heard):
    progress = Progress()
    source = ScriptedSource()
    with sampling(heard, source, interval_s=NEVER_S, progress=progress):
        until(lambda: len(heard.samples) == 1)
        progress.enter("train")
        until(lambda: len(heard.samples) == 2)
        with progress.during("validate"):
            pass
        progress.enter("test")
        until(lambda: len(heard.samples) == 3)
    assert [sample.phase for sample in heard.samples] == ["start", "start", "train"]
    assert source.reads == [True, "edge", "edge"]


def test_the_last_stretch_counts_when_training_is_cut_short(heard, monkeypatch):
    patient(monkeypatch)
    progress = Progress()

    def be_cut_short():
        until(lambda: len(heard.samples) == 1)
        progress.enter("validate")
        until(lambda: len(heard.samples) == 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sampling(heard, ScriptedSource(), interval_s=NEVER_S, progress=progress):
        be_cut_short()
    assert [sample.phase for sample in heard.samples] == ["start", "start", "validate"]
    progress.enter("test")  # nobody listens any more
    assert len(heard.samples) == 3


# ---- Trouble ----


def test_a_source_that_hangs_is_left_alone_and_reported_at_the_end(heard):
    stuck, well = ScriptedSource(0), ScriptedSource(HOST, name="host")
    stuck.gate.clear()
    progress = Progress()
    with sampling(heard, stuck, well, progress=progress):
        until(lambda: len(heard.of(HOST)) > 5)
    assert len(stuck.reads) == 1
    assert heard.of(0) == []
    (event,) = heard.events
    assert (event["kind"], event["trouble"]) == ("telemetry_trouble", "stuck")
    assert "the gpu" in event["message"]
    samples, events = list(heard.samples), list(heard.events)
    progress.enter("train")  # nobody listens any more
    stuck.gate.set()
    until(stuck.is_closed.is_set)
    assert (heard.samples, heard.events) == (samples, events)


def test_a_source_that_fails_ends_alone(heard, caplog):
    def fail():
        raise RuntimeError("a fault of ours")

    faulty, well = ScriptedSource(0, then=fail), ScriptedSource(HOST, name="host")
    progress = Progress()
    with sampling(heard, faulty, well, progress=progress):
        until(faulty.is_closed.is_set)
        progress.enter("train")
        before = len(heard.of(HOST))
        until(lambda: len(heard.of(HOST)) > before + 3)
    (event,) = heard.events
    assert event["trouble"] == "failed"
    assert event["message"] == "the gpu is no longer watched: RuntimeError: a fault of ours"
    assert len(faulty.reads) == 1
    assert "a fault of ours" in caplog.text


# ---- Cost ----


def test_what_watching_costs_is_the_threads_cpu_time(heard):
    now_s = [0.0]

    def burn():
        until_s = time.thread_time() + 0.02
        while time.thread_time() < until_s:
            pass
        now_s[0] = 1.0

    watching = sampling(heard, ScriptedSource(then=burn), ScriptedSource(1), interval_s=NEVER_S, now_s=lambda: now_s[0])
    with watching:
        until(lambda: watching.cpu_frac() >= 0.02)
    now_s[0] = 100.0
    assert 0.02 <= watching.cpu_frac() < 1.0  # of the second that it was at it, whenever it is asked


# ---- A driver in trouble ----


def gpu_sampling(heard, *watched, **options):
    sampler = sampling(heard, **options)
    sampler.watch(watched or [watched_gpu(0, "GPU-1")])
    return sampler


def test_a_driver_that_hangs_holds_nothing_up(heard, fake_driver):
    hang = Hang("nvmlDeviceGetMemoryInfo_v2", 1.5, once=True)
    with fake_driver.load(Scenario([h200()], hangs=[hang])) as driver:
        with gpu_sampling(heard, interval_s=0.02):
            until(lambda: len(heard.of(HOST)) > 5)
        assert heard.troubles() == ["stuck"]
        assert driver.num_users() == 1  # it is still at it
        samples = list(heard.samples)
        until(lambda: driver.num_users() == 0)
        assert driver.num_gpm_samples() == 0
    assert heard.of(0) == []
    assert heard.samples == samples
    assert heard.troubles() == ["stuck"]


# ---- What is handed over ----
