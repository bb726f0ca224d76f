import numpy as np
import pytest

from wellfed.batches import BuildTime
from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock


class Device:
    """A stream that works through its queue by itself: each mark is passed when the work before it is done."""

    def __init__(self, host):
        self.host, self.free_at_s, self.events = host, 0.0, []

    def work(self, seconds):
        self.free_at_s = max(self.free_at_s, self.host.now_s) + seconds

    def event(self):
        event = Event(self)
        self.events.append(event)
        return event


class Event:
    def __init__(self, device):
        self.device, self.at_s, self.was_seen_passed, self.stream = device, None, False, None

    def record(self, stream=None):
        self.at_s, self.was_seen_passed, self.stream = max(self.device.free_at_s, self.device.host.now_s), False, stream
        self.device.events.remove(self)  # in the order of their latest records
        self.device.events.append(self)

    def query(self):
        passed = self.device.host.now_s >= self.at_s
        if passed:  # in one stream, so are all before it
            for event in self.device.events[: self.device.events.index(self) + 1]:
                event.was_seen_passed = True
        return passed

    def elapsed_time(self, end_event):
        assert self.was_seen_passed, "asked for the time of a mark before query() was True"
        assert end_event.was_seen_passed, "asked for the time of a mark before query() was True"
        return 1e3 * (end_event.at_s - self.at_s)


class Host:
    """A training loop on an injected clock; with a device, work is launched and runs beside the host."""

    def __init__(self, *, has_device):
        self.now_s, self.step = 100.0, 0
        self.device = Device(self) if has_device else None
        self.clock = StepClock(now_s=lambda: self.now_s, new_event=self.device.event if has_device else None)

    def sleep(self, ms):
        self.now_s += ms / 1e3

    def launch(self, ms):
        if self.device is None:
            self.sleep(ms)
        else:
            self.device.work(ms / 1e3)

    def one_step(self, *, wait, copy, compute, host, warmup=False):
        self.clock.ask()
        self.sleep(wait)
        self.clock.got()
        self.clock.copy_begins(epoch=0)
        self.launch(copy)
        self.clock.copied()
        self.launch(compute)
        self.step += 1
        self.clock.end(step=self.step, samples=8, micro_batch=4, num_micro=2, warmup=warmup)
        self.sleep(host)

    def phases(self, *phases, copy=0, before=0, warmup=False):
        """Makes a step whose compute is a sequence of phases and what each takes."""
        self.clock.ask(), self.clock.got(), self.clock.copy_begins(epoch=0)
        self.launch(copy)
        self.clock.copied()
        self.launch(before)
        for phase, ms in phases:
            self.clock.mark((phase, self.clock.now_s()))
            self.launch(ms)
        self.step += 1
        self.clock.end(step=self.step, samples=8, micro_batch=4, num_micro=2, warmup=warmup)

    def idle(self):
        self.now_s = max(self.now_s, self.device.free_at_s)

    def rows(self):
        return list(self.clock.rows())


def shares(row):
    return (row.wait_ms, row.copy_ms, row.compute_ms, row.host_ms)


def test_on_a_cpu_the_hosts_clock_tells_the_shares():
    host = Host(has_device=False)
    for _ in range(3):
        host.one_step(wait=3, copy=0, compute=10, host=2)
    first, second, third = host.rows()
    assert shares(first) == pytest.approx((3, None, 10, 0), nan_ok=True)
    assert shares(second) == shares(third) == pytest.approx((3, None, 10, 2))
    assert second.step_ms == pytest.approx(15)
    assert [row.step for row in (first, second, third)] == [1, 2, 3]
    assert first.time_s == pytest.approx(0.013)
    assert (first.samples, first.micro_batch, first.num_micro, first.epoch) == (8, 4, 2, 0)


def test_what_building_the_batch_took_goes_with_its_step():
    host = Host(has_device=False)
    for built in (BuildTime(4.0, 3.0, 2.0, 17), None):
        host.clock.ask(), host.clock.got(), host.clock.copy_begins(0, built), host.clock.copied()
        host.clock.end(step=1, samples=1, micro_batch=1, num_micro=1)
    first, second = host.rows()
    assert (first.build_ms, first.build_cpu_ms, first.launch_ms) == (4, 3, None)
    assert (first.slowest_ms, first.slowest_index) == (2, 17)
    assert (second.build_ms, second.build_cpu_ms, second.slowest_index) == (None, None, None)


def test_on_a_device_the_hosts_time_to_launch_a_step_is_told():
    host = Host(has_device=True)
    host.clock.ask(), host.clock.got(), host.clock.copy_begins(0), host.clock.copied()
    host.device.work(0.5)
    host.sleep(7)
    host.clock.end(step=1, samples=1, micro_batch=1, num_micro=1)
    host.idle()
    (row,) = host.rows()
    assert row.launch_ms == pytest.approx(7)
    assert row.compute_ms == pytest.approx(500)


def test_a_device_that_is_never_idle_shows_no_wait_and_no_host_time():
    host = Host(has_device=True)
    for _ in range(5):
        host.one_step(wait=3, copy=2, compute=20, host=1)  # 4 ms of the host's hide behind 22 of the device's
    host.idle()
    for row in host.rows()[1:]:
        assert shares(row) == pytest.approx((0, 2, 20, 0))
        assert row.asked_wait_ms == pytest.approx(3)


def test_a_device_that_is_starved_shows_the_wait():
    host = Host(has_device=True)
    for _ in range(5):
        host.one_step(wait=30, copy=2, compute=10, host=1)
    host.idle()
    for row in host.rows()[1:]:  # 31 ms pass on the host, of which the device is busy for 12
        assert shares(row) == pytest.approx((19, 2, 10, 0))
        assert row.step_ms == pytest.approx(31)


def test_shares_add_up_to_the_devices_time_line():
    host = Host(has_device=True)
    for number in range(20):
        host.one_step(wait=number % 7, copy=number % 3, compute=5 + number % 11, host=number % 5)
    host.idle()
    rows = host.rows()
    ends = [event.at_s for event in host.device.events[2::3]]
    assert sum(row.step_ms for row in rows[1:]) == pytest.approx(1e3 * (ends[-1] - ends[0]))


def test_no_row_before_the_device_has_passed_its_end():
    host = Host(has_device=True)
    for _ in range(3):
        host.one_step(wait=0, copy=1, compute=100, host=1)
    assert host.rows() == []
    host.sleep(110)
    assert [row.step for row in host.rows()] == [1]
    host.idle()
    assert [row.step for row in host.rows()] == [2, 3]


@pytest.mark.parametrize("has_device", [False, True])
def test_what_lies_between_steps_after_an_interrupt_belongs_to_neither(has_device):
    host = Host(has_device=has_device)
    host.one_step(wait=1, copy=0, compute=5, host=1)
    host.clock.interrupt()
    host.sleep(10_000)  # a validation
    host.one_step(wait=2, copy=0, compute=5, host=1)
    host.one_step(wait=2, copy=0, compute=5, host=1)
    if has_device:
        host.idle()
    rows = host.rows()
    assert [row.wait_ms for row in rows[:2]] == pytest.approx([1, 2])
    assert rows[1].step_ms == pytest.approx(7)
    assert all(row.step_ms < 10 for row in rows)


def test_time_goes_on_from_an_earlier_part_of_the_run():
    clock = StepClock(origin_s=40.0, now_s=lambda: 100.0)
    assert clock.time_s() == 60
    clock.ask(), clock.got(), clock.copy_begins(3), clock.copied()
    clock.end(step=9, samples=1, micro_batch=1, num_micro=1, warmup=True)
    (row,) = clock.rows()
    assert (row.time_s, row.epoch, row.warmup) == (60, 3, True)


MICRO_BATCHES = ((FORWARD, 3), (BACKWARD, 7), (FORWARD, 2), (BACKWARD, 6), (OPTIMIZER, 4), (OTHER, 1))


def on_host(row):
    return (row.forward_ms, row.backward_ms, row.optimizer_ms)


def on_device(row):
    return (row.device_forward_ms, row.device_backward_ms, row.device_optimizer_ms)


def test_phases_are_sums_over_the_micro_batches_of_a_step():
    host = Host(has_device=False)
    host.phases(*MICRO_BATCHES, before=5)
    (row,) = host.rows()
    assert on_host(row) == pytest.approx((5, 13, 4))
    assert row.compute_ms == pytest.approx(28)  # with 6 ms of other work
    assert on_device(row) == (None, None, None)


def test_the_device_times_the_phases_that_the_host_only_launches():
    host = Host(has_device=True)
    for _ in range(13):
        host.phases(*MICRO_BATCHES, copy=2, before=5)
        host.idle()
    rows = [row for row in host.rows() if row.device_forward_ms is not None]
    assert len(rows) in (2, 3)
    for row in rows:
        assert on_device(row) == pytest.approx((5, 13, 4))
        assert row.compute_ms == pytest.approx(28)
        assert row.copy_ms == pytest.approx(2)
        assert row.launch_ms == 0


@pytest.mark.parametrize("has_device", [False, True])
@pytest.mark.parametrize("phases", [[], [(FORWARD, 3), (OTHER, 1)]])
def test_phases_are_unknown_and_not_0_without_a_backward_pass(has_device, phases):
    host = Host(has_device=has_device)
    host.phases(*phases, before=2)
    if has_device:
        host.idle()
    (row,) = host.rows()
    assert on_host(row) == on_device(row) == (None, None, None)
    assert row.compute_ms == pytest.approx(2 + sum(ms for _, ms in phases))


@pytest.mark.parametrize("has_device", [False, True])
def test_phases_are_unknown_where_a_backward_pass_was_not_seen(has_device):
    host = Host(has_device=has_device)
    host.phases((FORWARD, 3), (BACKWARD, 7), (OPTIMIZER, 1), (FORWARD, 9), (OPTIMIZER, 1), (OTHER, 1))
    if has_device:
        host.idle()
    (row,) = host.rows()
    assert on_host(row) == on_device(row) == (None, None, None)


def test_gradients_may_be_of_earlier_steps():
    host = Host(has_device=False)
    host.phases((FORWARD, 3), (BACKWARD, 7))
    host.phases((FORWARD, 3), (BACKWARD, 6))
    host.phases((OPTIMIZER, 2), (FORWARD, 3), (BACKWARD, 5))
    assert [on_host(row) for row in host.rows()] == [
        pytest.approx(found) for found in [(3, 7, 0), (3, 6, 0), (3, 5, 2)]
    ]


@pytest.mark.parametrize(("micro_batches", "apart"), [(1, 3), (3, 7), (20, 15)])
def test_a_step_has_one_event_more_on_average(micro_batches, apart):
    host = Host(has_device=True)
    phases = [*[(FORWARD, 2), (BACKWARD, 3)] * micro_batches, (OPTIMIZER, 1)]
    for _ in range(300):
        host.phases(*phases)
        host.sleep(1)
    host.idle()
    rows = host.rows()
    strides = np.diff([row.step for row in rows if row.device_backward_ms is not None])
    assert set(strides.tolist()) == {apart - 1, apart, apart + 1}
    assert strides.mean() == pytest.approx(apart, abs=0.3)
    expected = (2 * micro_batches, 3 * micro_batches, 1)
    assert all(on_device(row) in [(None, None, None), pytest.approx(expected)] for row in rows)
    assert all(row.compute_ms == pytest.approx(sum(expected)) for row in rows)
    assert all(row.forward_ms == 0 for row in rows)  # of a host that only launches


def test_copies_that_others_make_are_copy_wherever_they_are():
    """Work between two of a step is compute, and what comes before them is host time."""
    host, few = Host(has_device=True), 0
    for step in range(200):
        num_copies = (0, 3)[step % 2]
        for is_early in (True, False):
            for _ in range(num_copies):
                host.launch(0 if is_early else 5)
                host.clock.copies(is_done=False)
                host.clock.copies(is_done=False)  # the one before was a cast on the host
                host.launch(2)
                host.clock.copies(is_done=True)
            if is_early:
                host.clock.ask(), host.clock.got(), host.clock.copy_begins(epoch=0), host.clock.copied()
        for phase, ms in ((FORWARD, 10), (BACKWARD, 20), (OPTIMIZER, 5)):
            host.clock.mark((phase, host.clock.now_s()))
            host.launch(ms)
        host.clock.end(step=step, samples=8, micro_batch=8, num_micro=1)
        host.idle()
        (row,) = host.rows()
        assert shares(row) == pytest.approx((0, 12, 45, 5) if num_copies else (0, 0, 35, 0))
        few = few or (step == 20 and len(host.device.events))
    assert len(host.device.events) == few
