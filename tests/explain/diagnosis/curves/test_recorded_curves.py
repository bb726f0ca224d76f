"""Curves from files as nvidia-smi, the monitor, a run and shells write them, whole and damaged."""

import codecs
import math
import random
import string
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.examples import examples
from wellfed.errors import DataError
from wellfed.explain.diagnosis.curves.recorded_curves import RecordedCurves, read_curves

Write = Callable[..., RecordedCurves]


@pytest.fixture
def read(tmp_path: Path) -> Write:
    """Returns a function that writes a file and reads its curves."""

    def written(content: str | bytes) -> RecordedCurves:
        path = tmp_path / "gpus.csv"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_curves(path)

    return written


def stamp(second: float, apart_ms: int = 0) -> str:
    milliseconds = round(1000 * second) + apart_ms
    minutes, rest = divmod(milliseconds, 60_000)
    return f"2024/05/01 12:{34 + minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"


def smi(
    columns: str,
    gpus: int = 1,
    seconds: int = 60,
    *,
    every_s: float = 1.0,
    apart_ms: int = 0,
    units: bool = True,
    util: Callable[[int, int], str] = lambda round_, gpu: str(10 * gpu + round_ % 10),
) -> str:
    """Returns the text that nvidia-smi writes for these columns."""
    units_of = {"utilization.gpu": " %", "memory.used": " MiB"}
    titles = {"utilization.gpu": "utilization.gpu [%]", "memory.used": "memory.used [MiB]"}
    asked = columns.split(",")
    lines = [", ".join(titles.get(name, name) for name in asked)]
    for round_ in range(seconds):
        for gpu in range(gpus):
            values = {
                "timestamp": stamp(round_ * every_s, gpu * apart_ms),
                "index": str(gpu),
                "name": "NVIDIA H200",
                "uuid": f"GPU-{gpu}abc",
                "pci.bus_id": f"00000000:{gpu}1:00.0",
                "memory.used": "1234",
                "utilization.gpu": util(round_, gpu),
            }
            lines.append(", ".join(values[name] + (units_of.get(name, "") if units else "") for name in asked))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("told_by", ["index", "uuid", "pci.bus_id"])
def test_each_gpu_has_its_curve_by_what_tells_it_apart(read: Write, told_by: str, units: bool) -> None:
    file = read(smi(f"timestamp,{told_by},name,utilization.gpu,memory.used", 3, units=units, apart_ms=2))
    assert [len(curve.time_s) for curve in file.curves] == [60, 60, 60]
    assert [curve.util_pct[0] for curve in file.curves] == [0, 10, 20]
    assert [curve.card for curve in file.curves] == ["NVIDIA H200"] * 3
    assert file.curves[2].time_s[:2] == pytest.approx([0.004, 1.004], abs=1e-6)
    assert (file.writer, file.unread, file.interval_s) == ("nvidia-smi", 0, pytest.approx(1.0))


@pytest.mark.parametrize("apart_ms", [0, 3])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_without_a_column_that_tells_them_apart_rows_of_a_round_are_as_many_gpus(
    read: Write, gpus: int, apart_ms: int
) -> None:
    file = read(smi("timestamp,utilization.gpu", gpus, apart_ms=apart_ms))
    assert [curve.gpu for curve in file.curves] == [str(gpu) for gpu in range(gpus)]
    assert all(
        list(curve.util_pct[:3]) == [10 * gpu, 10 * gpu + 1, 10 * gpu + 2] for gpu, curve in enumerate(file.curves)
    )


def test_rounds_that_are_uneven_are_taken_for_one_gpu(read: Write) -> None:
    rng = random.Random(0)
    times, now = [], 0.0
    for _ in range(100):
        now += rng.choice([0.002, 0.5, 1.0])
        times.append(now)
    text = "timestamp, utilization.gpu [%]\n" + "".join(f"{stamp(at)}, 7 %\n" for at in times)
    (curve,) = read(text).curves
    assert len(curve.util_pct) == 100


def test_readings_every_half_second_keep_their_milliseconds(read: Write) -> None:
    file = read(smi("timestamp,index,utilization.gpu", every_s=0.5))
    assert file.interval_s == pytest.approx(0.5)
    assert file.curves[0].time_s[3] == pytest.approx(1.5)


@pytest.mark.parametrize("refusal", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", ""])
def test_what_a_card_does_not_tell_is_no_reading(read: Write, refusal: str) -> None:
    file = read(smi("timestamp,index,utilization.gpu", 2, util=lambda round_, gpu: refusal if gpu else "50"))
    assert [len(curve.util_pct) for curve in file.curves] == [60, 0]
    file = read(smi("timestamp,index,utilization.gpu", util=lambda round_, gpu: refusal if round_ % 2 else "50"))
    assert len(file.curves[0].util_pct) == 30


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: codecs.BOM_UTF16_LE + text.replace("\n", "\r\n").encode("utf-16-le"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    ],
    ids=["plain", "crlf", "utf-8 bom", "powershell", "utf-16 be"],
)
def test_a_shell_may_write_it_as_it_likes(read: Write, encode: Callable[[str], bytes]) -> None:
    file = read(encode(smi("timestamp,index,name,utilization.gpu", 2)))
    assert [(curve.gpu, len(curve.time_s)) for curve in file.curves] == [("0", 60), ("1", 60)]
    assert file.curves[1].util_pct[3] == 13


def test_the_last_line_counts_only_whole(read: Write) -> None:
    text = smi("timestamp,index,utilization.gpu", util=lambda round_, gpu: "100")
    file = read(text.rstrip("\n").removesuffix("0 %"))
    assert (len(file.curves[0].util_pct), set(file.curves[0].util_pct)) == (59, {100.0})


def test_a_second_header_and_other_lines_are_left_out(read: Write) -> None:
    text = smi("timestamp,index,utilization.gpu")
    file = read("a warning of the shell\n" + text + text + "torn, 0\n\nnonsense, 0, 5 %\n")
    assert len(file.curves[0].util_pct) == 60  # the second file begins as early as the first
    assert (file.unread, file.out_of_order) == (2, 60)


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([9e8, *range(60)], range(60)),  # the clock was wrong at first
        ([*range(30), 9e8, *range(31, 60)], [*range(30), *range(31, 60)]),
        ([*range(30), 9e8, 9e8 + 1, *range(32, 70)], range(32, 70)),
        ([*range(40), *range(20, 50)], range(40)),  # it was set back
        ([*range(20), *range(10, 50)], range(10, 50)),
        ([0, 1, 2, 1.5, 3, 4], [0, 1, 3, 4]),
        ([0, 1, 2, 50, 51, 52], [0, 1, 2, 50, 51, 52]),  # a pause
    ],
)
def test_where_the_clock_goes_back_the_longest_stretch_in_order_is_kept(
    read: Write, times: list[float], kept: list[float]
) -> None:
    file = read("time_s,gpu,util_pct\n" + "".join(f"{at},0,50\n" for at in times))
    assert list(file.curves[0].time_s) == [at - kept[0] for at in kept]
    assert (file.unread, file.out_of_order) == (0, len(times) - len(kept))


def test_csv_of_wellfed_is_read_without_the_host(read: Write) -> None:
    rows = "".join(
        f"2026-01-01T00:00:00Z,{at / 2},{gpu},{util}\n" for at in range(50) for gpu, util in ((-1, ""), (1, 40))
    )
    (curve,) = read("timestamp,time_s,gpu,util_pct\n" + rows).curves
    assert (curve.gpu, set(curve.util_pct), curve.time_s[2]) == ("1", {40.0}, 1.0)


def test_of_a_run_only_the_steps_count(read: Write) -> None:
    rows = "".join(
        f"{at},5,{phase},0,{util}\n" for at, (phase, util) in enumerate([("start", 0), ("train", 90), ("ceiling", 100)])
    )
    file = read("time_s,step,phase,gpu,util_pct\n" + rows)
    assert (file.writer, list(file.curves[0].util_pct)) == ("wellfed", [90.0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n \n", "is empty"),
        (bytes(range(256)) * 40, "is no text with lines"),
        (b"x" * 100_000, "is no text with lines"),
        (b"\x1b[31mred\x1b[0m,b\n1,2\n", r"Its first line: \x1b[31mred\x1b[0m, b"),
        (b"step,loss\n1,2\n", "has no column of utilisation (utilization.gpu or util_pct). Its first line: step, loss"),
        (b"utilization.gpu [%]\n40 %\n", "has no column of time"),
        (b"2024/05/01 12:34:56.789, 0, 45 %, 3 MiB\n" * 9, "has no header: nvidia-smi wrote it with noheader"),
        (b"2024/05/01 12:34:56.789, 0, 45, 3\n" * 9, "has no header"),
        (b"timestamp, utilization.gpu [%]\n", "no readings of a GPU"),
        (b"timestamp, utilization.gpu [%]", "no readings of a GPU"),
        (b"time_s,gpu,util_pct,cpu_pct\n1,-1,,50\n", "no readings of a GPU, only of the host"),
        (b"time_s,step,phase,gpu,util_pct\n1,0,start,0,50\n", "no readings of a GPU in training"),
        (b"timestamp, utilization.gpu [%]\n01.05.2024 12:34:56, 7 %\n", "no time that can be read; the first: '01.05."),
        (b"timestamp; utilization.gpu [%]\n2024/05/01 12:34:56; 7 %\n", "has semicolons between its columns"),
        (b"timestamp\tutilization.gpu [%]\n2024/05/01 12:34:56\t7 %\n", "has tabs between its columns"),
        (b'timestamp, utilization.gpu [%]\n"' + b"x" * 200_000 + b"\n", "is no CSV (field larger than"),
    ],
)
def test_what_is_no_telemetry_is_said_with_the_way_out(read: Write, content: bytes, said: str) -> None:
    with pytest.raises(DataError) as caught:
        read(content)
    assert said in str(caught.value)
    assert "gpus.csv" in str(caught.value)


def test_a_file_that_can_not_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere.csv: can't be read: No such file"):
        read_curves(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="can't be read: Is a directory"):
        read_curves(tmp_path)


@examples(37)
@given(data=st.data())
def test_whatever_a_file_holds_it_is_curves_or_a_message(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "gpus.csv"
    cell = st.text(string.printable, max_size=8) | st.sampled_from(
        [stamp(1), stamp(2.5), "nan", "inf", "-1", "45 %", "1e999"]
    )
    rows = data.draw(st.lists(st.lists(cell, max_size=6), max_size=12))
    head = data.draw(
        st.sampled_from(
            ["", "timestamp, utilization.gpu [%]\n", "time_s,gpu,util_pct\n", "index,timestamp,utilization.gpu\n"]
        )
    )
    path.write_text(head + "\n".join(",".join(row) for row in rows), newline="")
    try:
        file = read_curves(path)
    except DataError:
        return
    for curve in file.curves:
        assert len(curve.time_s) == len(curve.util_pct)
        assert all(0 <= value <= 100 for value in curve.util_pct)
        assert all(math.isfinite(at) for at in curve.time_s)
        assert list(curve.time_s) == sorted(curve.time_s)


@pytest.mark.slow
def test_a_million_rows_take_seconds(read: Write) -> None:
    rows = "".join(f"{stamp(at / 1000)}, 0, 50 %, 3 MiB\n" for at in range(1_000_000))
    began_s = time.monotonic()
    file = read("timestamp, index, utilization.gpu [%], memory.used [MiB]\n" + rows)
    assert time.monotonic() - began_s < 20
    assert len(file.curves[0].util_pct) == 1_000_000
