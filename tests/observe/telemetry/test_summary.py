import pytest

from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.series import Sample, Summary


def always(from_s, to_s):
    return to_s - from_s


def summary_of(*rows, samples=0, trained=always):
    """Rows are (phase, figures) or (phase, figures, gpu), a second apart."""
    summary = Summary(trained)
    for at_s, (phase, values, *gpu) in enumerate(rows):
        summary.add([Sample(float(at_s), 0, phase, gpu[0] if gpu else 0, values)])
    return summary.entry(samples, trained(0.0, len(rows) - 1.0))


def test_figures_are_over_training_and_what_comes_in_between():
    counting = ["train", "validate", "checkpoint"]
    rows = [(phase, {"util_pct": 10.0 * number}) for number, phase in enumerate(counting)]
    rows += [(phase, {"util_pct": 100.0}) for phase in ("start", "test", "ceiling")]
    entry = summary_of(*rows)
    assert list(entry) == ["0"]
    assert list(entry["0"]) == ["util_pct"]
    figures = entry["0"]["util_pct"]
    assert (figures["mean"], figures["max"], figures["n"]) == (10.0, 20.0, 3)


def test_energy_is_shared_out_by_the_time_of_training_between_two_readings():
    def trained(from_s, to_s):  # from 1.5 to 3.5
        return max(0.0, min(to_s, 3.5) - max(from_s, 1.5))

    entry = summary_of(
        ("start", {"energy_j": 100.0}),
        ("start", {"energy_j": 150.0}),
        ("train", {"energy_j": 250.0}),  # half of it was training
        ("train", {"util_pct": 5.0}),
        ("train", {"energy_j": 450.0}),  # 1.5 s of 2
        ("test", {"energy_j": 999.0}),
        samples=80,
        trained=trained,
    )
    assert entry["0"]["energy_j"] == 50 + 150
    assert entry["0"]["energy_per_sample_j"] == pytest.approx(200 / 80)


def test_a_counter_that_was_read_for_a_part_of_training_says_nothing_per_sample():
    rows = [("train", {"energy_j": 10.0}), ("train", {"energy_j": 20.0}), *[("train", {"util_pct": 1.0})] * 5]
    entry = summary_of(*rows, samples=10)
    assert entry["0"]["energy_j"] == 10
    assert "energy_per_sample_j" not in entry["0"]


def test_a_counter_that_goes_back_takes_nothing_away():
    counters = [10.0, 30.0, 5.0, 6.0]
    assert summary_of(*[("train", {"energy_j": j}) for j in counters])["0"] == {"energy_j": 21.0}


def test_gpus_are_apart_and_the_host_is_none():
    entry = summary_of(
        ("train", {"util_pct": 1.0, "energy_j": 5.0}, 10),
        ("train", {"util_pct": 2.0, "energy_j": 50.0}, 9),
        ("train", {"cpu_pct": 3.0}, HOST),
        ("train", {"energy_j": 7.0}, 10),
        ("train", {"energy_j": 90.0}, 9),
    )
    assert list(entry) == ["9", "10"]
    assert (entry["10"]["energy_j"], entry["9"]["energy_j"]) == (2.0, 40.0)
    assert (entry["10"]["util_pct"]["mean"], entry["9"]["util_pct"]["mean"]) == (1.0, 2.0)


@pytest.mark.slow
def test_it_may_be_asked_while_it_is_added_to(at_once):
    summary, entries = Summary(always), []
    names = [f"x{number}" for number in range(300)]

    def add(number):
        summary.add([Sample(number, 0, "train", number % 7, {names[number]: 1.0, "energy_j": float(number)})])

    at_once(300, add, lambda number: entries.append(summary.entry(1, 1.0)))
    assert len(entries) == 300
    assert sum(len(figures) for figures in summary.entry(0, 1.0).values()) == 300 + 7
