import threading
import time

import pytest

from tests.fake_nvml.driver import Hang, Scenario
from tests.kit.watched import Heard, ScriptedSource, a100, h200, until
from wellfed.observe.telemetry import sampler as sampler_file
from wellfed.observe.telemetry.gpu import WatchedGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.series import Reading, Sample

NEVER_S = 600.0
"""An interval in which only edges bring rounds."""


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch):
    """What is slow to a person is slow to a test much sooner."""
    monkeypatch.setattr(sampler_file, "STUCK_S", 0.1)
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


def test_samples_say_how_far_the_run_is(heard):
    progress = Progress()
    with sampling(heard, ScriptedSource(), progress=progress):
        until(lambda: heard.samples)
        progress.enter("train")
        progress.step_done(41)
        until(lambda: (heard.samples[-1].step, heard.samples[-1].phase) == (41, "train"))
        progress.enter("validate")
        until(lambda: heard.samples[-1].phase == "validate")


def test_a_reading_without_figures_is_no_row(heard):
    source = ScriptedSource()
    readings = [Reading(0, {}), Reading(1, {"x": 1.0})]
    source.read = lambda *, slow, edge: (source.reads.append(slow), readings)[1]
    with sampling(heard, source):
        until(lambda: len(source.reads) >= 3)
    assert heard.of(0) == []
    assert len(heard.of(1)) >= 2


def test_dear_figures_are_read_every_few_seconds(heard):
    now_s = [0.0]

    def a_second():
        now_s[0] += 1.0

    source = ScriptedSource(then=a_second)
    with sampling(heard, source, interval_s=0.001, now_s=lambda: now_s[0]):
        until(lambda: len(source.reads) >= 12)
    assert source.reads[:12] == [True, *[False] * 4, True, *[False] * 4, True, False]


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


def test_edges_in_quick_succession_have_a_round_each(heard, monkeypatch):
    patient(monkeypatch)
    progress, source = Progress(), ScriptedSource()
    source.gate.clear()
    with sampling(heard, source, interval_s=NEVER_S, progress=progress):
        until(lambda: source.reads)
        for phase in ["train", "test", "train"]:
            progress.enter(phase)
        source.gate.set()
        until(lambda: len(heard.samples) == 4)
    assert [sample.phase for sample in heard.samples] == ["start", "start", "train", "test", "train"]


def test_what_is_being_read_as_training_ends_still_counts_to_it(heard, monkeypatch):
    patient(monkeypatch)
    progress, source = Progress(), ScriptedSource()
    progress.enter("train")
    source.gate.clear()
    with sampling(heard, source, interval_s=NEVER_S, progress=progress):
        until(lambda: source.reads)
        progress.enter("test")
        source.gate.set()
    assert [sample.phase for sample in heard.samples] == ["train", "train"]


def test_the_last_stretch_counts_when_the_block_ends_right_after(heard, monkeypatch):
    patient(monkeypatch)
    progress = Progress()
    with sampling(heard, ScriptedSource(), interval_s=NEVER_S, progress=progress):
        until(lambda: len(heard.samples) == 1)
        progress.enter("train")
        progress.enter("start")
    assert [sample.phase for sample in heard.samples] == ["start", "start", "train"]


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


def test_a_source_that_hangs_is_left_alone(heard):
    stuck, well = ScriptedSource(0), ScriptedSource(HOST, name="host")
    stuck.gate.clear()
    progress = Progress()
    with sampling(heard, stuck, well, progress=progress):
        until(lambda: "stuck" in heard.troubles())
        before = len(heard.of(HOST))
        until(lambda: len(heard.of(HOST)) > before + 5)
    assert len(stuck.reads) == 1
    assert heard.of(0) == []
    (event,) = heard.events
    assert (event["kind"], event["trouble"]) == ("telemetry_trouble", "stuck")
    assert event["message"].startswith("a reading of the gpu has not come back for ")
    samples, events = list(heard.samples), list(heard.events)
    progress.enter("train")  # nobody listens any more
    stuck.gate.set()
    until(stuck.is_closed.is_set)
    assert (heard.samples, heard.events) == (samples, events)
    assert len(stuck.reads) == 1


def test_a_source_that_hangs_at_the_end_is_told_of(heard):
    stuck = ScriptedSource()
    progress = Progress()
    with sampling(heard, stuck, interval_s=NEVER_S, progress=progress):
        until(lambda: heard.samples)
        stuck.gate.clear()
        progress.enter("train")
    assert heard.troubles() == ["stuck"]
    stuck.gate.set()
    until(stuck.is_closed.is_set)
    assert len(heard.samples) == 1


def test_a_source_that_hangs_in_closing_is_told_of(heard):
    stuck, gate, is_over = ScriptedSource(), threading.Event(), threading.Event()
    stuck.close = lambda: (gate.wait(30), is_over.set())
    with sampling(heard, stuck, interval_s=NEVER_S):
        until(lambda: heard.samples)
    assert heard.troubles() == ["stuck"]
    gate.set()
    until(is_over.is_set)


def test_a_source_that_comes_back_is_read_on(heard):
    stuck, well = ScriptedSource(0), ScriptedSource(HOST, name="host")
    stuck.gate.clear()
    with sampling(heard, stuck, well):
        until(lambda: heard.events)
        stuck.gate.set()
        until(lambda: len(heard.of(0)) >= 3)
    assert heard.troubles() == ["stuck"]


def test_a_source_that_takes_longer_than_the_interval_is_told_of_once(heard):
    now_s = [0.0]

    def half_a_second():
        now_s[0] += 0.5

    slow = ScriptedSource(then=half_a_second)
    with sampling(heard, slow, interval_s=0.03, now_s=lambda: now_s[0]):
        until(lambda: len(heard.samples) >= 3)
        assert heard.samples[1].values == {"x": 2}
        until(lambda: len(heard.samples) >= 6)
    (event,) = heard.events
    assert event["trouble"] == "slow"
    assert event["message"] == (
        "a reading of the gpu takes 0.50 s, longer than the 0.03 s between readings: there are fewer rows."
    )


def test_a_reading_that_is_late_now_and_then_is_no_trouble(heard):
    now_s, slow = [0.0], ScriptedSource()

    def now_and_then():
        now_s[0] += 0.5 if len(slow.reads) % 3 else 0.0

    slow._then = now_and_then
    with sampling(heard, slow, interval_s=0.005, now_s=lambda: now_s[0]):
        until(lambda: len(heard.samples) >= 20)
    assert heard.events == []


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


def test_a_source_that_fails_in_closing_reaches_nobody(heard, caplog):
    faulty = ScriptedSource()
    faulty.close = lambda: 1 // 0
    with sampling(heard, faulty, interval_s=NEVER_S):
        until(lambda: heard.samples)
    assert heard.troubles() == ["failed"]


def test_a_taker_that_fails_becomes_an_event(heard, caplog):
    source = ScriptedSource()
    with sampling(heard, source, take=lambda samples: 1 // 0):
        until(source.is_closed.is_set)
    assert heard.troubles() == ["failed"]


def test_trouble_that_many_threads_see_is_told_once(heard):
    stuck = ScriptedSource()
    stuck.gate.clear()
    others = [ScriptedSource(number, name=f"other {number}") for number in range(1, 5)]
    with sampling(heard, stuck, *others, interval_s=0.001):
        until(lambda: heard.events)
        until(lambda: len(heard.of(4)) > 100)
    assert heard.troubles() == ["stuck"]
    stuck.gate.set()
    until(stuck.is_closed.is_set)


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
    sampler.watch(watched or [WatchedGpu(0, "GPU-1")])
    return sampler


def test_a_driver_that_hangs_holds_nothing_up(heard, fake_driver):
    hang = Hang("nvmlDeviceGetMemoryInfo_v2", 1.5, once=True)
    with fake_driver.load(Scenario([h200()], hangs=[hang])) as driver:
        with gpu_sampling(heard, interval_s=0.02):
            until(lambda: heard.events)
            assert len(heard.of(HOST)) > 1
        assert heard.troubles() == ["stuck"]
        assert driver.num_users() == 1  # it is still at it
        samples = list(heard.samples)
        until(lambda: driver.num_users() == 0)
        assert driver.num_gpm_samples() == 0
    assert heard.of(0) == []
    assert heard.samples == samples
    assert heard.troubles() == ["stuck"]


def test_a_driver_that_hangs_in_opening_and_comes_back(heard, fake_driver):
    hang = Hang("nvmlInitWithFlags", 0.4, once=True)
    with fake_driver.load(Scenario([h200()], hangs=[hang])) as driver:
        with gpu_sampling(heard, interval_s=0.02):
            until(lambda: heard.events)
            until(lambda: len(heard.of(0)) >= 3)
        until(lambda: driver.num_users() == 0)
    assert heard.troubles() == ["stuck"]


def test_a_slow_driver_gives_fewer_rows(heard, fake_driver, monkeypatch):
    monkeypatch.setattr(sampler_file, "STUCK_S", 20.0)
    patient(monkeypatch)
    with fake_driver.load(Scenario([a100()], slow_ms=20)) as driver:
        with gpu_sampling(heard, interval_s=0.05):
            until(lambda: "slow" in heard.troubles())
            until(lambda: len(heard.of(0)) >= 5)
        assert driver.num_users() == 0
    assert heard.troubles().count("slow") == 1
    assert set(heard.troubles()) == {"slow", "metric_absent"}


def test_a_slow_driver_is_not_stuck_and_its_gpus_come_one_by_one(heard, fake_driver, monkeypatch):
    """A round takes longer than a call may; each GPU is handed over as it is there."""
    monkeypatch.setattr(sampler_file, "STUCK_S", 1.0)
    gpus = [a100(f"GPU-{number}") for number in range(3)]
    watched = [WatchedGpu(number, gpu.uuid) for number, gpu in enumerate(gpus)]
    with fake_driver.load(Scenario(gpus, slow_ms=20)), gpu_sampling(heard, *watched, interval_s=0.05):
        until(lambda: len(heard.of(0)) >= 4)
    assert [trouble for trouble in heard.troubles() if trouble != "metric_absent"] == ["slow"]
    assert [sample.gpu for sample in heard.samples if sample.gpu >= 0][:6] == [0, 1, 2, 0, 1, 2]


def test_a_sink_that_hangs_costs_its_rows_alone(heard):
    gate, published = threading.Event(), []

    def publish(samples):
        published.append(samples[0].gpu)
        if samples[0].gpu == 0:
            gate.wait(30)

    with sampling(heard, ScriptedSource(0), ScriptedSource(HOST, name="host"), publish=publish):
        until(lambda: len(heard.of(HOST)) > 5)
    assert len(heard.of(0)) == published.count(0) == 1
    assert heard.troubles() == ["stuck"]
    gate.set()


def test_a_second_signal_while_the_end_waits_still_closes_the_way_out(heard, monkeypatch):
    stuck = ScriptedSource()
    stuck.gate.clear()
    watching = sampling(heard, stuck)
    monkeypatch.setattr(watching.watches[0].ticker, "join", lambda timeout_s: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), watching:
        until(lambda: stuck.reads)
    stuck.gate.set()
    until(stuck.is_closed.is_set)
    assert heard.samples == []


# ---- What is handed over ----

ROW = Sample(0.0, 0, "train", 0, {"x": 1.0})


def test_what_goes_in_comes_out_until_it_is_closed(heard):
    sampler = heard.sampler()
    sampler.take(lambda: [ROW, ROW])
    sampler.event("gpu_lost", gpu=3)
    sampler.close()
    sampler.take(lambda: [ROW])
    sampler.event("gpu_back", gpu=3)
    assert heard.samples == [ROW, ROW]
    assert heard.events == [{"kind": "gpu_lost", "gpu": 3}]


def test_a_round_without_samples_is_not_handed_on(heard):
    taken = []
    heard.sampler(take=taken.append).take(list)
    assert taken == []


def test_samples_are_stamped_when_it_is_their_turn(heard, at_once):
    clock, taken = iter(range(10_000)), []

    def stamped():
        at_s = float(next(clock))
        return [Sample(at_s, 0, "train", 0, {})]

    sampler = heard.sampler(take=taken.extend)
    at_once(300, *[lambda _: sampler.take(stamped)] * 3)
    assert [sample.time_s for sample in taken] == list(range(900))


def test_nobody_waits_for_ever_for_a_taker_that_hangs(heard, monkeypatch):
    monkeypatch.setattr(sampler_file, "PATIENCE_S", 0.05)
    gate, begun = threading.Event(), threading.Event()
    sampler = heard.sampler(take=lambda samples: (begun.set(), gate.wait(30)))
    sending = threading.Thread(target=sampler.take, args=(lambda: [ROW],))
    sending.start()
    begun.wait(30)
    sampler.event("gpu_lost")
    sampler.close()
    assert heard.events == []
    gate.set()
    sending.join(20)
    assert not sending.is_alive()


def test_closing_awaits_what_is_on_its_way(heard):
    gate, taken = threading.Event(), []

    def take(samples):
        taken.append("begun")
        gate.wait(30)
        taken.append("done")

    sampler = heard.sampler(take=take)
    sending = threading.Thread(target=sampler.take, args=(lambda: [ROW],))
    sending.start()
    until(lambda: taken)
    closing = threading.Thread(target=lambda: (sampler.close(), taken.append("closed")))
    closing.start()
    closing.join(0.02)
    assert taken == ["begun"]
    gate.set()
    closing.join(20)
    sending.join(20)
    assert taken == ["begun", "done", "closed"]


def test_whoever_takes_a_sample_may_tell_something(heard):
    sampler = heard.sampler(take=lambda samples: sampler.event("disk_full"))
    sampler.take(lambda: [ROW])
    assert heard.events == [{"kind": "disk_full"}]


def test_threads_go_out_one_at_a_time(heard, at_once):
    inside, most = [], []

    def take(samples):
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    sampler = heard.sampler(take=take, on_event=lambda kind, **facts: take(()))
    at_once(
        200, lambda _: sampler.take(lambda: [ROW]), lambda _: sampler.take(lambda: [ROW]), lambda _: sampler.event("x")
    )
    assert set(most) == {1}
    assert len(most) == 600
