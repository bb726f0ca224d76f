import pytest

from tests.kit.seen import board_of, sample, seen
from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_of
from wellfed.monitor.monitor import summary_lines
from wellfed.observe.telemetry.series import HOST


def lines_of(*gpus, curves, problem=None, host=(), span_s=60.0):
    """Returns the summary of curves of utilisation, read twice a second."""
    board = board_of(*gpus)
    for gpu, curve in zip(gpus, curves, strict=True):
        for place, util_pct in enumerate(curve):
            values = {"mem_used_gib": 30 + place / 100, "power_w": 300.0, "energy_j": 150.0 * place}
            values |= {} if util_pct is None else {"util_pct": util_pct}
            board.add([sample(place / 2, gpu.index, values)])
    board.add([sample(place / 2, HOST, values) for place, values in enumerate(host)])
    return summary_lines(board, span_s, problem)


def test_mean_and_peak_of_everything():
    host = [{"cpu_pct": 100.0, "mem_used_gib": 10.0}, {"cpu_pct": 300.0, "mem_used_gib": 12.0}]
    assert lines_of(seen(0), curves=[[80] * 100 + [94] * 21], host=host)[:-1] == [
        "Watched for 1 min 00 s.",
        "GPU 0 NVIDIA H200: utilisation 82 % on average: well used.",
        "  utilisation: mean 82 %, peak 94 %",
        "  memory: mean 30.6 GiB, peak 31.2 of 140.5 GiB",
        "  power: mean 300 W, peak 300 of 700 W; 18 kJ",
        "Host:",
        "  CPU: mean 50 %, peak 75 % of 4 cores",
        "  memory: mean 11.0 GiB, peak 12.0 of 62.8 GiB",
    ]


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([85.0] * 120, "well used"),
        ([65.0] * 120, "room left"),
        ([30.0] * 120, "starved"),
        (([95.0] * 10 + [10.0] * 10) * 12, "swings"),
    ],
)
def test_each_verdict_has_a_next_step(curve, verdict):
    lines = lines_of(seen(0), curves=[curve])
    assert f": {verdict}" in lines[1]
    board = board_of(seen(0))
    for place, util_pct in enumerate(curve):
        board.add([sample(place / 2, 0, {"util_pct": util_pct})])
    assert lines[-1] == utilisation_of(*board.curve(0)).advice


def test_gpus_with_the_same_verdict_share_the_next_step():
    lines = lines_of(*(seen(index) for index in range(3)), curves=[[30] * 20, [90] * 20, [20] * 20])
    assert [line.partition(": ")[0] for line in lines[-2:]] == ["GPU 0, GPU 2", "GPU 1"]


def test_an_instances_multiprocessors_are_told():
    instance = seen(2, "NVIDIA H200 MIG 1g.18gb", is_mig=True, nvml_index=0, power_limit_w=None)
    board = board_of(instance)
    board.add([sample(second, 2, {"sm_active_pct": 10.0 * second}) for second in range(5)])
    lines = summary_lines(board, 5.0, None)
    assert lines[1].startswith("GPU 2 NVIDIA H200 MIG 1g.18gb of GPU 0: ")
    assert lines[2] == "  SM active: mean 20 %, peak 40 %"


def test_without_nvml_the_host_is_told_and_that_no_gpu_is_known():
    host = [{"cpu_pct": 100.0, "mem_used_gib": 10.0}]
    assert lines_of(curves=[], problem="library not found", host=host)[1:] == [
        "GPU utilisation is unknown (NVML: library not found).",
        "Host:",
        "  CPU: mean 25 %, peak 25 % of 4 cores",
        "  memory: mean 10.0 GiB, peak 10.0 of 62.8 GiB",
        "What is missing: python -m wellfed doctor",
    ]
