"""Time by a roofline: what a kernel computes and moves, the multiprocessors it fills, tensor cores, throttling; and
what NVML shows of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d, embedding, linear, scaled_dot_product_attention

from tests.end_to_end.commands import start_warm
from tests.fake_cuda.machine import Cards, FakeCuda, machine_environment
from tests.fake_nvml.driver import FakeDriver

pytestmark = pytest.mark.slow
"""Of the simulated cards by themselves; tests of what runs on them are not."""

TIMEOUT_S = 100
CARD: dict[str, Any] = {"tflops": 1e-3, "tensor_tflops": 4e-3, "dram_gbps": 1.0, "sms": 4}
"""An operation of float32 or a byte takes it a nanosecond; 4096 elements fill it."""
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def took_ns(call: Callable[[], object]) -> float:
    """Of the card. It is so far behind the host that it never waits for it."""
    ahead = torch.ones(256, 256, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        ahead @ ahead
    first.record()
    call()
    last.record()
    last.synchronize()
    return 1e6 * first.elapsed_time(last)


def ones(*size: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.ones(size, device="cuda", dtype=dtype)


def product_ns(rows: int, dtype: torch.dtype) -> float:
    a, b = ones(rows, 64, dtype=dtype), ones(64, 64, dtype=dtype)
    return took_ns(lambda: a @ b)


@pytest.mark.simulated(**CARD)
def test_products_take_the_time_of_their_arithmetic() -> None:
    torch.backends.cudnn.allow_tf32 = False
    a, b, images, weight, queries = (
        ones(64, 64),
        ones(3, 64, 64),
        ones(2, 8, 18, 18),
        ones(16, 8, 3, 3),
        ones(1, 4, 32, 32),
    )
    convolved = conv2d(images, weight)
    product, convolution = 2 * 64**3, 2 * convolved.numel() * 8 * 9
    for name, call, expected in (
        ("mm", lambda: a @ a, product),
        ("addmm", lambda: linear(a, a, a[0]), product),
        ("bmm", lambda: torch.bmm(b, b), 3 * product),
        ("convolution", lambda: conv2d(images, weight), convolution),
        ("transposed", lambda: conv_transpose2d(convolved, weight), convolution),
        ("attention", lambda: scaled_dot_product_attention(queries, queries, queries), 4 * queries.numel() * 32),
    ):
        assert took_ns(call) == pytest.approx(expected, rel=1e-3), name
    for leaves in ([images.requires_grad_()], [images, weight.requires_grad_()]):
        out = conv2d(images, weight)
        took = took_ns(lambda: torch.autograd.grad(out, leaves, convolved))  # noqa: B023  called at once
        assert took == pytest.approx(len(leaves) * convolution, rel=1e-3)


@pytest.mark.simulated(**CARD)
def test_other_kernels_take_the_time_of_their_bytes() -> None:
    large, table, ids = ones(1 << 16), ones(1 << 14, 64), torch.arange(16, device="cuda")
    for name, call, num_bytes in (
        ("add", lambda: large + large, 3 * large.nbytes),
        ("in place", lambda: large.add_(1), 2 * large.nbytes),
        ("sum", large.sum, large.nbytes),
        ("copy", large.clone, 2 * large.nbytes),
        ("cast", large.bfloat16, 1.5 * large.nbytes),
        ("expanded", lambda: ones(1).expand(1 << 16) + 1, large.nbytes),
        ("rows of a table", lambda: embedding(ids, table), ids.nbytes * 2 + 2 * 16 * 64 * 4),
    ):
        assert took_ns(call) == pytest.approx(num_bytes, rel=0.01, abs=400), name
    assert took_ns(lambda: table[ids]) < 0.01 * table.nbytes


@pytest.mark.simulated(**CARD)
def test_a_small_batch_takes_as_long_as_one_that_fills_the_card() -> None:
    took = {rows: product_ns(rows, FLOAT) for rows in (16, 32, 64, 128)}
    assert took[16] == pytest.approx(took[64], rel=0.01) == pytest.approx(took[32], rel=0.01)
    assert took[128] == pytest.approx(2 * took[64], rel=0.01)


@pytest.mark.simulated(**CARD)
def test_tensor_cores_are_faster_by_type_and_setting() -> None:
    took = {dtype: product_ns(64, dtype) for dtype in (FLOAT, BFLOAT, HALF)}
    assert took[FLOAT] == pytest.approx(4 * took[BFLOAT], rel=0.01) == pytest.approx(4 * took[HALF], rel=0.01)
    images, weight = ones(2, 8, 18, 18), ones(16, 8, 3, 3)
    with_tf32 = took_ns(lambda: conv2d(images, weight))  # torch's default
    torch.backends.cudnn.allow_tf32 = False
    assert took_ns(lambda: conv2d(images, weight)) == pytest.approx(2 * with_tf32, rel=0.01)
    torch.set_float32_matmul_precision("high")
    assert product_ns(64, FLOAT) == pytest.approx(took[FLOAT] / 2, rel=0.01)


@pytest.mark.simulated(**CARD, capability="7.5")
def test_an_older_card_has_tensor_cores_for_half_alone() -> None:
    assert torch.cuda.get_device_capability() == (7, 5)
    torch.set_float32_matmul_precision("high")
    took = {dtype: product_ns(64, dtype) for dtype in (FLOAT, BFLOAT, HALF)}
    assert took[FLOAT] == pytest.approx(took[BFLOAT], rel=0.01) == pytest.approx(4 * took[HALF], rel=0.01)


@pytest.mark.simulated(**CARD, throttle="0.01:0.5:heat")
def test_a_throttled_card_is_slower_from_then_on() -> None:
    import fake_cuda

    a = ones(64, 64)
    torch.cuda.synchronize()
    first = torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(5):
        a @ a
    before = took_ns(lambda: a @ a)  # it is busy for more than 10 ms meanwhile
    assert before == pytest.approx(2 * 2 * 64**3, rel=0.01)
    with pytest.raises(ValueError, match="not like 10:0.5:heat"):
        fake_cuda.throttling("10:2:heat")


SECRET_SHOWN = """
import json, time, fake_cuda, pynvml, torch
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
METRICS = {"sm": 2, "occupancy": 3, "tensor": 5, "dram": 10}

def sample():
    taken = pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(card, taken)
    return taken

def seen(call):
    call()
    torch.cuda.synchronize()
    first, began_ns, until_s = sample(), time.monotonic_ns(), time.monotonic() + 0.5
    event = torch.cuda.Event()
    while time.monotonic() < until_s:
        call()
        event.synchronize()  # at most one launch ahead
        event.record()
    ended_ns = time.monotonic_ns()
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics, asked.sample1, asked.sample2 = 1, len(METRICS), first, sample()
    for place, number in enumerate(METRICS.values()):
        asked.metrics[place].metricId = number
    pynvml.nvmlGpmMetricsGet(asked)
    found = {name: asked.metrics[place].value for place, name in enumerate(METRICS)}
    found["busy"] = 100 * fake_cuda.driver.busy_ns(0, began_ns, ended_ns) / (ended_ns - began_ns)
    found["mhz"] = pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)
    found["reasons"] = pynvml.nvmlDeviceGetCurrentClocksEventReasons(card)
    return found

def ones(*size, dtype=torch.float32):
    return torch.ones(size, device="cuda", dtype=dtype)

a, b, few, large = ones(256, 256), ones(256, 256, dtype=torch.bfloat16), ones(8, 256), ones(1 << 18)
host = torch.ones(1 << 16).pin_memory()
print(json.dumps({
    "float32": seen(lambda: a @ a),
    "bfloat16": seen(lambda: b @ b),
    "few rows": seen(lambda: few @ a),
    "adds": seen(lambda: large + large),
    "idle": seen(lambda: time.sleep(0.01)),
    "copies": seen(lambda: host.to("cuda", non_blocking=True)),
}))
"""
SLOW_CARD = Cards(tflops=2e-3, tensor_tflops=8e-3, dram_gbps=0.1, sms=16, copy_gbps=0.01)


@pytest.mark.parametrize(
    ("throttle", "mhz", "reasons"), [("", 1500, 0), ("0:0.5:heat", 750, 0x20), ("0:0.8:power", 1200, 4)]
)
def test_nvml_shows_how_much_of_the_card_is_used(
    throttle: str, mhz: int, reasons: int, tmp_path: Path, fake_cuda: FakeCuda, fake_driver: FakeDriver
) -> None:
    (tmp_path / "shown.py").write_text(SECRET_SHOWN)
    machine = machine_environment(fake_driver, tmp_path, replace(SLOW_CARD, throttle=throttle))
    out, err = start_warm(tmp_path / "shown.py", cwd=tmp_path, **machine).communicate(timeout=TIMEOUT_S)
    assert err == ""
    seen = json.loads(out)
    for name, sm, tensor, dram in (
        ("float32", 100, 0, 47),
        ("bfloat16", 100, 100, 94),
        ("few rows", 12.5, 0, 67),
        ("adds", 100, 0, 100),
        ("idle", 0, 0, 0),
        ("copies", 0, 0, 0),
    ):
        shown = seen[name]
        busy = shown["busy"] / 100
        assert shown["sm"] == pytest.approx(sm * busy, abs=3), (name, shown)
        assert shown["occupancy"] == pytest.approx(shown["sm"] / 2), (name, shown)
        assert shown["tensor"] == pytest.approx(tensor * busy, abs=3), (name, shown)
        assert shown["dram"] == pytest.approx(dram * busy * mhz / 1500, abs=3), (name, shown)
        assert (name == "idle") == (busy < 0.1)
        assert (shown["mhz"], shown["reasons"]) == (mhz, reasons)


@pytest.mark.parametrize(("capability", "has_gpm"), [("8.0", False), ("9.0", True)])
def test_gpm_is_there_from_capability_9_on(
    capability: str, has_gpm: bool, tmp_path: Path, fake_cuda: FakeCuda, fake_driver: FakeDriver
) -> None:
    machine = machine_environment(fake_driver, tmp_path, Cards(capability=capability, tflops=1))
    scenario = Path(machine["FAKE_NVML_SCENARIO"]).read_text().splitlines()
    assert {f"gpm {has_gpm:d}", f"major {capability[0]}"} <= set(scenario)
