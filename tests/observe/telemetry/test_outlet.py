import threading

from tests.kit.watched import Heard, until
from wellfed.observe.telemetry import outlet as outlet_file
from wellfed.observe.telemetry.outlet import Outlet
from wellfed.observe.telemetry.series import Sample

ROW = Sample(0.0, 0, "train", 0, {"x": 1.0})


def test_what_goes_in_comes_out_until_it_is_closed():
    heard = Heard()
    outlet = heard.outlet()
    outlet.take(lambda: [ROW, ROW])
    outlet.event("gpu_lost", gpu=3)
    outlet.close()
    outlet.take(lambda: [ROW])
    outlet.event("gpu_back", gpu=3)
    assert heard.samples == [ROW, ROW]
    assert heard.events == [{"kind": "gpu_lost", "gpu": 3}]


def test_a_round_without_samples_is_not_handed_on():
    taken = []
    Outlet(taken.append, lambda kind, **facts: None).take(list)
    assert taken == []


def test_samples_are_stamped_when_it_is_their_turn(at_once):
    clock, taken = iter(range(10_000)), []

    def stamped():
        at_s = float(next(clock))
        return [Sample(at_s, 0, "train", 0, {})]

    outlet = Outlet(taken.extend, lambda kind, **facts: None)
    at_once(300, *[lambda _: outlet.take(stamped)] * 3)
    assert [sample.time_s for sample in taken] == list(range(900))


def test_nobody_waits_for_ever_for_a_taker_that_hangs(monkeypatch):
    monkeypatch.setattr(outlet_file, "PATIENCE_S", 0.05)
    gate, begun, heard = threading.Event(), threading.Event(), Heard()
    outlet = Outlet(lambda samples: (begun.set(), gate.wait(30)), heard.outlet().event)
    sending = threading.Thread(target=outlet.take, args=(lambda: [ROW],))
    sending.start()
    begun.wait(30)
    outlet.event("gpu_lost")
    outlet.close()
    assert heard.events == []
    gate.set()
    sending.join(20)
    assert not sending.is_alive()


def test_closing_awaits_what_is_on_its_way():
    gate, taken = threading.Event(), []

    def take(samples):
        taken.append("begun")
        gate.wait(30)
        taken.append("done")

    outlet = Outlet(take, lambda kind, **facts: None)
    sending = threading.Thread(target=outlet.take, args=(lambda: [ROW],))
    sending.start()
    until(lambda: taken)
    closing = threading.Thread(target=lambda: (outlet.close(), taken.append("closed")))
    closing.start()
    closing.join(0.02)
    assert taken == ["begun"]
    gate.set()
    closing.join(20)
    sending.join(20)
    assert taken == ["begun", "done", "closed"]


def test_whoever_takes_a_sample_may_tell_something():
    heard = Heard()
    outlet = Outlet(lambda samples: outlet.event("disk_full"), heard.outlet().event)
    outlet.take(lambda: [ROW])
    assert heard.events == [{"kind": "disk_full"}]


def test_threads_go_out_one_at_a_time(at_once):
    inside, most = [], []

    def take(samples):
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    outlet = Outlet(take, lambda kind, **facts: take(()))
    at_once(
        200, lambda _: outlet.take(lambda: [ROW]), lambda _: outlet.take(lambda: [ROW]), lambda _: outlet.event("x")
    )
    assert set(most) == {1}
    assert len(most) == 600
