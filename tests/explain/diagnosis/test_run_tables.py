"""Tables of a run folder as columns, whole, cut off, or with odd cells."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wellfed.explain.diagnosis import run_tables
from wellfed.explain.diagnosis.run_tables import PHASES, columns, curves, gpu_figures, metric_curves, passes_ended
from wellfed.observe.telemetry.series import HOST


def same(found, expected):
    np.testing.assert_array_equal(found, np.array(expected, float))


def test_columns_of_numbers_with_empty_cells(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("step,wait_ms,copy_ms\n1,0.5,\n2,,3\n,1,\n")
    found = columns(path)
    same(found["step"], [1, 2, np.nan])
    same(found["copy_ms"], [np.nan, 3, np.nan])


def test_what_a_killed_run_left_is_read_up_to_its_last_whole_row(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("step,wait_ms\n1,4\n2,5\n3,6")
    same(columns(path)["wait_ms"], [4, 5])
    path.write_text("")
    assert "step" not in columns(path)
    assert columns(tmp_path / "none.csv") == {}


def test_of_damaged_rows_alone_nothing_is_read(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("step,wait_ms\n1,4\n\0,5\n3,6\n4,x\n5,7\n")
    same(columns(path)["wait_ms"], [4, 6, 7])


rows = st.lists(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=3, max_size=3), max_size=20)


@given(rows, st.integers(1, 200))
def test_a_table_reads_alike_in_pieces_of_any_size(tmp_path_factory, table, chunk):
    path = tmp_path_factory.mktemp("table") / "t.csv"
    path.write_text("a,b,c\n" + "".join(",".join("" if x is None else repr(x) for x in row) + "\n" for row in table))
    whole, run_tables._CHUNK_BYTES = run_tables._CHUNK_BYTES, chunk
    try:
        found = columns(path)
    finally:
        run_tables._CHUNK_BYTES = whole
    same(found["a"], [np.nan if row[0] is None else row[0] for row in table])
    same(found["c"], [np.nan if row[2] is None else row[2] for row in table])


def test_curves_are_told_apart_by_gpu_and_know_their_phases(tmp_path):
    (tmp_path / "telemetry.csv").write_text(
        "time_s,phase,gpu,util_pct,cpu_pct\n0,start,0,1,\n1,train,0,50,\n1,train,-1,,180\n2,train,1,60,\n3,train,0\n"
    )
    found = curves(tmp_path)
    assert set(found) == {0, 1, HOST}
    same(found[0]["util_pct"], [1, 50])
    assert [PHASES[int(phase)] for phase in found[0]["phase"]] == ["start", "train"]
    same(found[HOST]["cpu_pct"], [180])
    assert "power_w" not in found[0]
    assert curves(tmp_path / "none") == {}
    (tmp_path / "telemetry.csv").write_text("what,ever\n1,2\n")
    assert curves(tmp_path) == {}


def test_figures_are_over_training_and_energy_grows_where_it_ends(tmp_path):
    rows = [
        ("start", 0, "100", "", ""),
        ("start", 0, "", "100", ""),
        ("train", 0, "10", "150", ""),  # 50 J
        ("train", -1, "", "", "300"),
        ("checkpoint", 0, "30", "", ""),
        ("train", 0, "", "0", ""),  # another process
        ("validate", 0, "20", "30", ""),  # 30 J
        ("test", 0, "100", "999", ""),
    ]
    lines = [
        f"{at_s},1,{phase},{gpu},{util},{energy},{cpu}" for at_s, (phase, gpu, util, energy, cpu) in enumerate(rows)
    ]
    head = "time_s,step,phase,gpu,util_pct,energy_j,cpu_pct"
    (tmp_path / "telemetry.csv").write_text("\n".join([head, *lines, ""]))
    found = gpu_figures(tmp_path, 40)
    assert found == {
        "0": {
            "util_pct": {"mean": 20, "p5": 11, "p50": 20, "p95": 29, "max": 30, "n": 3},
            "energy_j": 80,
            "energy_per_sample_j": 2,
        }
    }
    assert gpu_figures(tmp_path / "none", 40) == {}


def test_a_metric_s_values_with_their_steps(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        'step,epoch,time_s,split,name,value\n10,0,1,train,loss,2.5\n10,0,1,val,loss,9\n10,0,1,val,"a,b",3\n'
        "20,0,2,train,loss,\n30,0,2,train\n"
    )
    found = metric_curves(tmp_path)
    assert set(found) == {("train", "loss"), ("val", "loss"), ("val", "a,b")}
    steps, values = found["train", "loss"]
    same(steps, [10, 20])
    same(values, [2.5, np.nan])
    assert metric_curves(tmp_path / "none") == {}
    (tmp_path / "metrics.csv").write_text("what,ever\n1,2\n")
    assert metric_curves(tmp_path) == {}


def test_a_pass_ended_when_its_figures_were_there(tmp_path):
    head = "step,epoch,time_s,split,name,value\n"
    rows = "1,0,5.5,val,loss,1\n1,0,5.5,val,auc,1\n2,0,6,train,loss,1\n4,0,9.5,val,loss,\n4,0,,test,loss,1\n"
    (tmp_path / "metrics.csv").write_text(head + rows)
    found = passes_ended(tmp_path)
    assert set(found) == {"val", "test"}
    same(found["val"], [5.5, 9.5])
    same(found["test"], [])
    assert passes_ended(tmp_path / "none") == {}
