import pytest

from wellfed.batches import BuildTime
from wellfed.observe.timing.step_clock import StepClock, StepRow


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
        self.device, self.at_s, self.was_seen_passed = device, None, False

    def record(self):
        self.at_s = max(self.device.free_at_s, self.device.host.now_s)

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


def test_each_step_is_given_once():
    host = Host(has_device=False)
    host.one_step(wait=1, copy=0, compute=1, host=1)
    assert len(host.rows()) == 1
    assert host.rows() == []


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


def test_what_of_a_gap_is_no_wait_is_the_hosts():
    host = Host(has_device=True)
    for _ in range(5):
        host.one_step(wait=4, copy=1, compute=5, host=20)
    host.idle()
    for row in host.rows()[1:]:  # a gap of 24 - 6 ms, of which 4 were spent waiting
        assert shares(row) == pytest.approx((4, 1, 5, 14))


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


def test_with_wait_the_rest_is_taken_without_asking():
    host = Host(has_device=True)
    for _ in range(3):
        host.one_step(wait=0, copy=1, compute=100, host=1)
    for event in host.device.events:
        event.was_seen_passed = True  # the caller has synchronised
        event.query = lambda: pytest.fail("asked")
    assert [row.step for row in host.clock.rows(wait=True)] == [1, 2, 3]


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


def test_without_the_interrupt_it_would_be_host_time():
    host = Host(has_device=False)
    host.one_step(wait=1, copy=0, compute=5, host=10_000)
    host.one_step(wait=1, copy=0, compute=5, host=1)
    assert host.rows()[1].host_ms == pytest.approx(10_000)


@pytest.mark.parametrize(("wait", "ready"), [(0.0, True), (0.04, True), (0.06, False), (0.5, False)])
def test_ready_is_by_how_long_the_loop_waited(wait, ready):
    host = Host(has_device=False)
    host.one_step(wait=wait, copy=0, compute=4, host=0)
    assert host.rows()[0].ready is ready


def test_a_hundredth_of_a_long_step_still_counts_as_ready():
    host = Host(has_device=True)
    for wait in (0, 0.9, 1.1):
        host.one_step(wait=wait, copy=0, compute=100, host=0)
    host.idle()
    assert [row.ready for row in host.rows()] == [True, True, False]


def test_an_end_without_a_beginning_is_no_step():
    host = Host(has_device=False)
    host.clock.end(step=1, samples=1, micro_batch=1, num_micro=1)
    host.clock.copied()
    assert host.rows() == []


def test_time_goes_on_from_an_earlier_part_of_the_run():
    clock = StepClock(origin_s=40.0, now_s=lambda: 100.0)
    assert clock.time_s() == 60
    clock.ask(), clock.got(), clock.copy_begins(3), clock.copied()
    clock.end(step=9, samples=1, micro_batch=1, num_micro=1, warmup=True)
    (row,) = clock.rows()
    assert (row.time_s, row.epoch, row.warmup) == (60, 3, True)


def step_row(**changes):
    facts = {"step": 1, "time_s": 0, "epoch": 0, "samples": 8, "micro_batch": 8, "num_micro": 1, "wait_ms": 1,
             "copy_ms": 2, "compute_ms": 4, "host_ms": 8, "asked_wait_ms": 1}  # fmt: skip
    return StepRow(**{**facts, **changes})


def test_a_step_is_the_sum_of_its_shares():
    assert step_row().step_ms == 15
    assert step_row(copy_ms=None).step_ms == 13


def test_ready_is_a_twentieth_of_a_millisecond_or_a_hundredth_of_the_step():
    assert step_row(asked_wait_ms=0.05).ready
    assert not step_row(asked_wait_ms=0.16).ready  # 1 % of 15 ms is 0.15
    assert step_row(asked_wait_ms=0.15).ready
    assert step_row(wait_ms=0, asked_wait_ms=0.05, copy_ms=None, compute_ms=0, host_ms=0).ready
