import math

import pytest

from wellfed.explain.report.run_lines import error_lines, sections
from wellfed.explain.report.write import to_markdown
from wellfed.record.entries import RunRecord


def full():
    return RunRecord(
        "2026-01-01_00-00-00_abcd",
        status="ok",
        workload="recsys",
        seed=3,
        overrides=["gpu=8gb", "seed=3"],
        steps=1200,
        epochs=1.5,
        samples=2_457_600,
        duration_s=75.0,
        throughput={"samples_per_s": 40_960.0, "ci95": [40_000.0, 42_000.0], "steps": 1197, "warmup_steps": 3,
                    "sample_unit": "triplets"},
        ceiling={"samples_per_s": 81_920.0},
        readiness_frac=0.25,
        time={"wait_frac": 0.5, "copy_frac": 0.0, "compute_frac": 0.4, "host_frac": 0.1, "step_ms_mean": 83.2,
              "step_ms_p50": 50.0, "step_ms_p95": 61.25},
        memory={"device": "NVIDIA H200", "budget_gib": 7.2, "measured_peak_gib": 5.5},
        machine={"gpus": [{"index": 0, "name": "NVIDIA H200"}, {"index": 1, "name": "NVIDIA RTX 4090"}]},
        gpus={
            "0": {"util_pct": {"mean": 47.4, "p5": 9.0, "p95": 90.0, "max": 91.0}, "sm_active_pct": {"mean": 31.0},
                  "mem_used_gib": {"mean": 12.34, "max": 13.04}, "power_w": {"mean": 312.0}, "energy_j": 34_120.0,
                  "energy_per_sample_j": 0.0139},
            "1": {"mem_used_gib": {"mean": 1.0, "max": 1.0}},
        },
        metrics={"test/ndcg_at_10": 0.123456789, "train/loss": math.nan},
        plan={"loader.num_workers": {"value": 3, "because": "a | b\nc", "source": "predicted"}},
        events=[{"kind": "oom", "step": 7, "time_s": 1.0, "message": "x"}],
    )  # fmt: skip


def test_a_report_in_the_order_a_reader_asks(tmp_path):
    full().write(tmp_path)
    text = to_markdown(RunRecord.read(tmp_path), {"train/loss": 0.75})
    parts = [
        "# recsys: 2026-01-01_00-00-00_abcd",
        "- ok: 1,200 steps in 1 min 15 s\n",
        "- 1.5 epochs, 2,457,600 triplets\n",
        "- rate: 40,960 triplets/s (40,000-42,000) over 1,197 steps after 3 of warm-up",
        "- of the ceiling: 50.0 % of 81,920 possible\n",
        "- GPU: 47 % (p5 9, p95 90)\n",
        "- GPU 0 NVIDIA H200: utilisation 47 %, SMs 31 %, memory 12.3 GiB (at most 13.0), 312 W, "
        "34.1 kJ, 13.9 mJ a sample\n",
        "- GPU 1 NVIDIA RTX 4090: memory 1.0 GiB (at most 1.0)\n",
        "- batches ready: 25 % when asked for\n",
        "- step: 83.2 ms (median 50 ms, p95 61.2 ms)\n",
        "- wait 50 % (41.6 ms), copy 0 % (0 ms), compute 40 % (33.3 ms), host 10 % (8.32 ms)\n",
        "NVIDIA H200, memory: 5.5 of 7.2 GiB",
        "| test/ndcg_at_10 |  | 0.12346 |",
        "| train/loss | 0.75 | not finite |",
        "| loader.num_workers | 3 | predicted | a \\| b c |",
        "| 7 | oom | time_s=1.0, message=x |",
        "- overrides: gpu=8gb seed=3\n- seed 3\n",
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)


@pytest.mark.parametrize("status", ["running", "killed", "failed"])
def test_a_run_that_never_got_far_has_a_report(status, tmp_path):
    record = RunRecord("r", status=status, error={"kind": "data", "message": "one\ntwo", "advice": "Do it."})
    record.write(tmp_path)
    text = to_markdown(RunRecord.read(tmp_path))
    for part in ("No step was timed.", "Nothing was measured.", "- overrides: none", "- data: one two\n- Do it."):
        assert part in text
    assert text.count("None.") == 4
    assert "nan" not in text


def test_a_signal_and_the_way_on_are_part_of_the_verdict():
    stop = {
        "kind": "signal",
        "step": 7,
        "time_s": 1.0,
        "message": "stopped by SIGTERM",
        "advice": "resume=auto goes on.",
    }
    record = RunRecord("r", status="interrupted", events=[stop])
    assert "- interrupted: 0 steps in 0 ms\n- stopped by SIGTERM\n- resume=auto goes on.\n" in to_markdown(record)
    record.status = "ok"  # it was gone on from
    assert error_lines(record) == []


def test_figures_of_a_simulated_card_are_marked():
    record = full()
    assert "Simulated" not in to_markdown(record)
    record.machine["gpus"][0].update(name="Simulated GPU 24 GiB", is_simulated=True)
    assert "Simulated: Simulated GPU 24 GiB." in to_markdown(record)


def test_events_of_a_kind_are_one_row():
    saved = [{"kind": "checkpoint", "step": step, "time_s": step / 2, "file": "last.ckpt"} for step in range(10, 63)]
    odd = [{"kind": "oom", "step": 20, "time_s": 1.0}]
    (section,) = (one for one in sections(RunRecord("r", events=[saved[0], *odd, *saved[1:]])) if one.name == "events")
    assert section.rows == [
        ("10 to 62", "checkpoint, 53 times", "time_s=31.0, file=last.ckpt"),
        ("20", "oom", "time_s=1.0"),
    ]
