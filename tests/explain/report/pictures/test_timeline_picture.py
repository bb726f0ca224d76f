"""Single steps on a time line: those of the usual length, each part in its place, the host's launches above them."""

import re

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.report.pictures.timeline_picture import timeline

Row = list[tuple[float, float, str]]
"""Begin, end (ms) and text of each part."""


def drawn(of: Evidence) -> tuple[dict[str, Row], str]:
    """The rows by name, and the caption."""
    (picture,) = timeline(of)
    image = str(picture.image)
    lasted = re.search(r'aria-label="Steps \d+ to \d+, ([\d.]+) (ms|s)\."', image)
    assert lasted is not None
    span_ms = float(lasted[1]) * {"ms": 1, "s": 1000}[lasted[2]]
    rows: dict[str, Row] = {}
    for name, track in re.findall(r"<span>(\w*)</span><span class=track>(.*?)</span>", image):
        at, row = 0.0, Row()
        for width, text in re.findall(r'width:([\d.]+)%"(?: title="([^"]*)")?', track):
            until = at + float(width) / 100 * span_ms
            row.append((at, until, text))
            at = until
        assert at <= 1.001 * span_ms
        rows[name] = row
    return rows, picture.caption


def on_a_gpu(ahead_ms: np.ndarray, *, begin_s: float = 5.0, steps: int = 100) -> Evidence:
    """Steps of 40 ms, whose launches end so long before the device does."""
    columns = {
        "time_s": begin_s + (40 * np.arange(1, steps + 1) - ahead_ms) / 1e3,
        "launch_ms": np.full(steps, 10.0),
        "compute_ms": np.full(steps, 30.0),
        "wait_ms": np.full(steps, 5.0),
        "copy_ms": np.full(steps, 2.0),
        "host_ms": np.full(steps, 3.0),
    }
    return evidence(steps=steps, wait_ms=5.0, compute_ms=30.0, host_ms=3.0, copy_ms=2.0, columns=columns)


def test_20_steps_of_the_usual_length_are_drawn_and_named() -> None:
    compute_ms = np.r_[np.full(40, 90.0), np.full(60, 10.0), np.full(80, 20.0), np.full(20, 80.0)]
    wait_ms = np.tile([0.0, 0.0, 0.0, 40.0], 50)
    times = np.cumsum(compute_ms + wait_ms + 0.1) / 1e3
    columns = {"compute_ms": compute_ms, "wait_ms": wait_ms, "time_s": times}
    rows, caption = drawn(evidence(steps=200, columns=columns))
    named = re.match(r"Steps (\d+) to (\d+) took (\d+) ms, the median of all 20 steps in a row\.$", caption)
    assert named is not None
    first, last, took = map(int, named.groups())
    assert last == first + 19
    lasted = np.convolve(compute_ms + wait_ms + 0.1, np.ones(20), "valid")
    assert took == pytest.approx(np.median(lasted), rel=0.02)
    assert took == pytest.approx(lasted[first - 1], rel=0.01)
    assert list(rows) == ["step", "CPU"]
    assert [text.split(" ")[1] for _, _, text in rows["step"]] == [str(step) for step in range(first, last + 1)]
    for name, column in (("wait", wait_ms), ("compute", compute_ms)):
        parts = {text: until - begin for begin, until, text in rows["CPU"] if f": {name} " in text}
        found = [
            next((ms for text, ms in parts.items() if f"step {step}:" in text), 0.0) for step in range(first, last + 1)
        ]
        assert found == pytest.approx(column[first - 1 : last].tolist(), abs=0.2)


def test_warm_up_in_the_middle_is_not_shown() -> None:
    at = np.arange(41)
    took_ms = np.where(at == 20, 5000.0, np.where(at < 20, 40.0, 60.0))
    columns = {"compute_ms": took_ms, "time_s": np.cumsum(took_ms) / 1e3, "warmup": (at == 20).astype(float)}
    _, caption = drawn(evidence(steps=41, host_ms=0.0, columns=columns))
    assert caption.startswith(("Steps 1 to 20 took 800 ms", "Steps 22 to 41 took 1"))
    short = {name: column[:39] for name, column in columns.items()}
    assert list(timeline(evidence(steps=39, host_ms=0.0, columns={**short, "warmup": (at[:39] == 19) * 1.0}))) == []


def test_a_pause_between_steps_is_empty() -> None:
    times = np.arange(1, 21) * 0.05 + np.where(np.arange(20) > 9, 0.3, 0.0)
    of = evidence(steps=20, compute_ms=50.0, host_ms=0.0, columns={"time_s": times})
    rows, _ = drawn(of)
    gaps = [(begin, until) for begin, until, text in rows["CPU"] if not text]
    assert gaps == [(pytest.approx(500, abs=1), pytest.approx(800, abs=1))]


@pytest.mark.parametrize("least_ms", [0.0, 25.0])
def test_launches_overlap_what_the_device_computes_of_earlier_steps(least_ms: float) -> None:
    """The host is up to 60 ms ahead, or 85: what is drawn is the least that its marks allow."""
    ahead_ms = least_ms + np.where(np.arange(100) % 10 == 0, 0.0, 60.0)
    rows, caption = drawn(on_a_gpu(ahead_ms))
    assert "as early as the host's marks allow" in caption
    assert list(rows) == ["step", "device", "host"]
    device = {text.split(":")[0]: until for _, until, text in rows["device"] if "compute" in text}
    host = {text.split(":")[0]: (begin, until) for begin, until, text in rows["host"] if text}
    both = device.keys() & host.keys()
    assert len(both) > 10
    for step in both:
        begin, launched = host[step]
        lead = device[step] - launched
        assert lead == pytest.approx(0.0 if int(step.split(" ")[1]) % 10 == 1 else 60.0, abs=0.1) or begin == 0.0


def test_where_times_are_too_coarse_the_host_is_left_out() -> None:
    of = on_a_gpu(np.zeros(100), begin_s=90_000.0)
    assert list(drawn(of)[0]) == ["step", "device", "host"]
    fast = evidence(
        steps=100, compute_ms=1.0, host_ms=0.1, copy_ms=0.1,
        columns={"time_s": 90_000 + np.round(np.arange(100) * 1.2e-3, 3), "launch_ms": np.full(100, 0.5)},
    )  # fmt: skip
    rows, caption = drawn(fast)
    assert list(rows) == ["step", "device"]
    assert "host" not in caption
    assert all(text for _, _, text in rows["device"])


def test_what_workers_do_has_no_place_and_is_said() -> None:
    columns = {"build_ms": np.full(100, 12.5)}
    _, caption = drawn(evidence(steps=100, plan={"loader.num_workers": 2}, columns=columns))
    assert caption.endswith("Workers built each of these batches in 12.5 ms on average; steps.csv does not have when.")
    _, caption = drawn(evidence(steps=100, plan={"loader.num_workers": 0}, columns=columns))
    assert "built" not in caption


def kinds_of(row: Row) -> list[str]:
    kinds = [text.split(": ")[1].rpartition(" ")[0].rpartition(" ")[0] for _, _, text in row if text]
    return [kind for kind in kinds if kind != "host"]  # too short to be drawn in each step


def test_phases_follow_each_other_within_compute() -> None:
    columns = {"forward_ms": np.full(50, 3.0), "backward_ms": np.full(50, 5.0), "optimizer_ms": np.full(50, 1.0)}
    rows, caption = drawn(evidence(steps=50, columns=columns))
    assert kinds_of(rows["CPU"])[:8] == 2 * ["forward", "backward", "other compute", "optimizer"]
    assert "not divided" not in caption


def test_steps_whose_phases_were_not_timed_are_drawn_with_compute_as_a_whole() -> None:
    each = {"forward_ms": 3.0, "backward_ms": 5.0, "optimizer_ms": 2.0}
    columns = {f"device_{name}": np.where(np.arange(60) % 4 == 0, ms, np.nan) for name, ms in each.items()}
    rows, caption = drawn(evidence(steps=60, copy_ms=1.0, columns=columns))
    kinds = [kind for kind in kinds_of(rows["device"]) if kind != "copy"]
    assert kinds.count("forward") == kinds.count("backward") == kinds.count("optimizer") == 5
    assert kinds.count("compute") == 15
    assert "Phases were not timed in 15 of these steps, so their compute is not divided." in caption


def test_few_steps_or_damaged_ones_have_no_picture() -> None:
    assert list(timeline(evidence(steps=19))) == []
    assert list(timeline(evidence(steps=0))) == []
    assert list(timeline(evidence(steps=100, columns={"time_s": np.full(50, 1.0)}))) == []
    nothing = np.full(100, np.nan)
    lost = {"time_s": nothing, "wait_ms": nothing, "compute_ms": nothing, "host_ms": nothing}
    assert list(timeline(evidence(steps=100, columns=lost))) == []
