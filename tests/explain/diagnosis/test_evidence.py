"""What a run folder gives the rules, also of a run that was cut short or lost its GPU on the way."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_rules import run_rules
from wellfed.observe.telemetry.series import HOST
from wellfed.record.entries import RunRecord


def test_a_folder_reads_as_what_the_run_had_in_memory(tmp_path):
    record = evidence(wait_ms=5, ceiling=1.4).record
    record.write(tmp_path)
    (tmp_path / "steps.csv").write_text("step,epoch,wait_ms,copy_ms,compute_ms,host_ms\n1,0,5,,10,0.1\n2,0,5,,10,0.1\n")
    found = Evidence.read(tmp_path)
    assert found.record == record
    assert found.steps.mean_ms == pytest.approx(15.1)
    assert not found.on_gpu
    assert found.copy_frac == 0


def test_the_warm_up_is_in_no_figure(tmp_path):
    given = evidence(steps=30, columns={"warmup": (np.arange(30) < 3).astype(float)})
    assert len(given.steps.column("wait_ms")) == 27
    assert len(given.all_steps["wait_ms"]) == 30


def compiled_again(*, steps=200, **more):
    """Steps of 50 ms, of which the last of the first epoch compiled for a minute. It is marked, as are the first."""
    at = np.arange(steps)
    compute_ms = np.where(at == 99, 60_000.0, 50.0)
    columns = {"compute_ms": compute_ms, "host_ms": np.zeros(steps), "time_s": np.cumsum(compute_ms) / 1e3}
    columns |= {"epoch": at // 100, "warmup": np.isin(at, (0, 1, 2, 99)).astype(float)}
    return evidence(steps=steps, compute_ms=50.0, host_ms=0.0, columns=columns, **more)


def test_warm_up_in_the_middle_of_a_run_is_in_no_figure_either():
    given = compiled_again(ceiling=1.0)
    assert given.steps.column("step").tolist() == [step for step in range(4, 201) if step != 100]
    assert given.steps.mean_ms == pytest.approx(50)
    assert given.steps.gap_ms == pytest.approx(np.zeros(196), abs=1e-6)
    assert given.steps.period_s(10) == pytest.approx(0.5)
    assert given.wall.once_s == pytest.approx(60, rel=0.01)
    assert given.wall.repeated_s == pytest.approx(10, rel=0.01)
    assert given.wall.steps_frac == pytest.approx(1.0)
    assert {"healthy", "slow_start"} == {finding.id for finding in run_rules(given)}


def write_steps(folder, given):
    """Writes the steps as a run does, of 8 samples each."""
    number = len(given.all_steps["step"])
    names = [name for name in given.all_steps if name != "copy_ms"] + ["samples", "ready"]
    table = {**given.all_steps, "samples": np.full(number, 8.0), "ready": np.ones(number)}
    rows = [",".join(f"{table[name][index]:g}" for name in names) for index in range(number)]
    (folder / "steps.csv").write_text("\n".join([",".join(names), *rows, ""]))


@pytest.mark.parametrize("status", ["running", "killed"])
def test_wall_time_of_a_resumed_run_is_its_tables_until_the_next_checkpoint(tmp_path, status):
    """The record has that of the process before, which ended after 5 s; the table has the minute since."""
    write_steps(tmp_path, compiled_again())
    names = ("start_s", "validation_s", "checkpoint_s", "epoch_end_s", "logging_s", "end_s", "other_s")
    wall = {"total_s": 5.0, "steps_s": 5.0, "callbacks": {}, **dict.fromkeys(names, 0.0)}
    events = [{"kind": kind, "step": 100, "time_s": 5.0} for kind in ("checkpoint", "resume", "checkpoint")]
    record = RunRecord("run", status=status, wall=wall, events=events[:2])
    found = Evidence.of(record, tmp_path).wall
    assert found.entry["total_s"] == pytest.approx(70, rel=0.01)
    assert found.repeated_s == pytest.approx(10, rel=0.01)
    assert Evidence.of(replace(record, events=events), tmp_path).wall.entry == wall


@pytest.mark.parametrize("status", ["ok", "killed"])
def test_rules_read_the_steps_and_readings_of_a_resumed_run_s_last_process(tmp_path, status):
    """Its first process waited 20 ms at each step, on cores that other programs kept busy."""
    at = np.arange(200)
    given = evidence(steps=200, columns={"wait_ms": np.where(at < 100, 20.0, 0.0), "time_s": 0.1 * (at + 1)}, ceiling=2)
    write_steps(tmp_path, given)
    rows = ["time_s,step,phase,gpu,cpu_pct,others_cpu_pct"]
    rows += [f"{0.1 * one:g},{one},train,-1,100,{300 if one < 100 else 0}" for one in at]
    (tmp_path / "telemetry.csv").write_text("\n".join([*rows, ""]))
    events = [{"kind": "resume", "step": 100, "time_s": 10.05}]
    found = Evidence.of(replace(given.record, status=status, events=events), tmp_path)
    assert found.steps.wait_ms.sum() == 0
    assert len(found.steps.wait_ms) == 100
    assert found.telemetry.mean("others_cpu_pct") == 0
    assert len(found.all_steps["step"]) == len(found.watched[HOST]["time_s"]) == 200, "for pictures"
    assert found.ceiling_factor == (2 if status == "ok" else None), "an earlier process measured it"


def test_a_knob_is_as_planned_else_as_configured_else_unknown():
    given = evidence(plan={"loader.num_workers": 3}, config={"loader": {"num_workers": None, "backend": "auto"}})
    assert given.value("loader.num_workers") == 3
    assert given.value("loader.backend") == "auto"
    assert given.value("loader.nothing") is None
    assert given.value("nothing.at.all") is None


def test_a_gpu_that_was_lost_on_the_way_leaves_a_gap_and_no_zero(tmp_path):
    evidence(copy_ms=0.1, ceiling=1.0).record.write(tmp_path)
    rows = ["time_s,step,phase,gpu,util_pct,power_w"]
    rows += [f"{at / 2},{at},train,0,{90 if at < 20 or at > 60 else ''},200" for at in range(100) if not 30 < at < 50]
    (tmp_path / "telemetry.csv").write_text("\n".join(rows) + "\n")
    found = Evidence.read(tmp_path)
    assert found.telemetry.mean("util_pct", 0) == 90
    assert found.telemetry.mean("sm_active_pct", 0) is None
    assert found.swings.of_gpus == {}
    assert [finding.id for finding in run_rules(found) if not finding.is_note] == []


def test_figures_of_a_running_run_are_newer_in_the_tables(tmp_path):
    old = {"samples_per_s": 3.0, "ci95": None, "steps": 9, "warmup_steps": 3, "sample_unit": "samples"}
    made_run(tmp_path, steps=400, step_ms=50.0, throughput=old)
    record = replace(RunRecord.read(tmp_path), steps=12, epochs=0.12, samples=12, duration_s=0.1, host={})
    assert Evidence.of(record, tmp_path).record.throughput == old
    found = Evidence.of(replace(record, status="running"), tmp_path).record
    assert found.throughput["samples_per_s"] == pytest.approx(64 / 0.05, rel=0.2)
    assert found.steps == 400
    assert found.gpus["0"]["util_pct"]["mean"] == pytest.approx(60, abs=2)
    (tmp_path / "steps.csv").unlink()
    assert Evidence.of(replace(record, status="running"), tmp_path).record.throughput == old


def test_nothing_of_what_is_not_there_is_a_figure():
    bare = Evidence(RunRecord("run"))
    assert bare.steps.mean_ms is None
    assert bare.ceiling_factor is None
    assert bare.cores is None
    assert bare.num_workers == 0
    assert len(bare.steps.column("wait_ms")) == 0


def test_a_run_killed_before_its_first_checkpoint_is_judged_by_its_table(tmp_path):
    config = {"workload": {"sample_unit": "images"}, "loader": {"backend": "processes", "num_workers": 1}}
    machine = {"cpu_quota_cores": 8.0}
    killed = RunRecord("run", status="killed", host_name="elsewhere", config=config, machine=machine)
    killed.write(tmp_path)
    head = (
        "step,time_s,epoch,samples,micro_batch,num_micro,wait_ms,copy_ms,compute_ms,host_ms,ready,build_ms,build_cpu_ms"
    )
    rows = [f"{n},{n / 20},0,32,32,1,30,,10,0.1,0,40,2,\n" for n in range(1, 101)]
    (tmp_path / "steps.csv").write_text(f"{head},launch_ms\n{''.join(rows)}101,5.")
    readings = "".join(f"{n / 20},{n},train,-1,80,1.5\n" for n in range(1, 101))
    (tmp_path / "telemetry.csv").write_text(f"time_s,step,phase,gpu,cpu_pct,rss_gib\n{readings}")
    found = Evidence.read(tmp_path)
    assert found.record.throughput["sample_unit"] == "images"
    assert found.record.throughput["steps"] == 100
    assert found.record.throughput["samples_per_s"] == pytest.approx(32 / 0.0401)
    assert found.wait_frac == pytest.approx(30 / 40.1)
    assert (found.record.steps, found.record.samples, found.record.duration_s) == (100, 3200, 5.0)
    assert found.record.host == {"cpu_pct": 80, "rss_gib": 1.5}
    first = run_rules(found)[0]
    assert first.id == "too_few_workers"
    assert "one worker builds a batch in 40 ms" in first.message


def test_others_take_of_a_quota_only_what_the_rest_of_the_machine_cannot_hold():
    curves = {HOST: {"others_cpu_pct": np.array([0.0, np.nan, 180.0, 6200.0, 6380.0, 6400.0])}}
    whole = evidence(cores=64.0, curves=curves, machine={"cpu_quota_cores": 64.0, "host_cores": 64})
    assert whole.telemetry.taken_cores[2:].tolist() == [1.8, 62.0, 63.8, 64.0]
    part = evidence(curves=curves, machine={"cpu_quota_cores": 2.0, "host_cores": 64})
    np.testing.assert_allclose(part.telemetry.taken_cores, [0.0, np.nan, 0.0, 0.0, 1.8, 2.0], atol=1e-9)
    assert part.telemetry.mean_others_cores == pytest.approx(3.8 / 5)
    assert evidence(machine={"cpu_quota_cores": 2.0}).telemetry.mean_others_cores is None
    small = evidence(curves=curves, machine={"cpu_quota_cores": 2.0})  # of a record that does not know the machine
    assert small.telemetry.taken_cores.max(initial=0, where=np.isfinite(small.telemetry.taken_cores)) == 2.0
