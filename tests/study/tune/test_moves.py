from typing import Any

from wellfed.record.entries import RunRecord
from wellfed.study.rows import Row
from wellfed.study.tune.moves import Move, TuneMachine, moves
from wellfed.study.tune.trial import TuneTrial

CPU, CARD = TuneMachine(4, on_gpu=False), TuneMachine(8, on_gpu=True)


def trial(wait: float, compute: float, *, copy: float | None = None, ceiling: float = 1.0, **knobs: Any) -> TuneTrial:
    planned = {"loader.backend": "inline", "loader.num_workers": 0, "gpu.compile": "none", **knobs}
    row = Row("p", "trial", (), "ok", 1, samples_per_s=100.0, ceiling_samples_per_s=100.0 * ceiling)
    record = RunRecord(
        "run",
        plan={knob: {"value": value, "because": "", "source": "predicted"} for knob, value in planned.items()},
        time={
            **{"wait_frac": wait, "copy_frac": copy, "compute_frac": compute, "host_frac": 0.0},
            **{"step_ms_mean": 1.0, "step_ms_p50": 1.0, "step_ms_p95": 1.0, "launch_ms_p50": None},
        },
        loading={"has_fetch": True, "build_ms_p50": 5.0, "cpu_frac": 1.0},
    )
    return TuneTrial(row, record)


def listed(found: TuneTrial, around: TuneMachine = CPU, **known: bool) -> list[Move]:
    return [*moves(found, around, **known)]


def test_the_largest_share_of_the_time_decides_what_comes_first_and_compiling_comes_last() -> None:
    knobs = {"memory.accumulate": 4}
    assert listed(trial(0.8, 0.2, **knobs))[0].kind == "data"
    assert listed(trial(0.2, 0.8, **knobs))[0].kind == "step"
    found = trial(0.2, 0.8, **knobs)
    assert listed(found)[-1].settings == ("gpu.compile=default",)
    found.record.overrides = ["gpu.compile=none"]  # typed, so it stays
    assert listed(found)[-1].kind == "data"


def test_features_that_are_not_kept_come_first_whatever_takes_the_time() -> None:
    for wait in (0.05, 0.95):
        found = trial(wait, 1 - wait, **{"memory.features": "dynamic"})
        assert listed(found)[0].settings == ("memory.features=cache",)
        found.record.plan["memory.features"]["source"] = "set"
        assert listed(found)[0].settings == ("memory.features=null",)
        assert listed(found)[0].bound >= 2
    assert not any("features" in move.settings[0] for move in listed(trial(0.5, 0.5, **{"memory.features": "cache"})))


def test_feeding_can_win_no_more_than_the_time_that_data_takes() -> None:
    assert {move.bound for move in listed(trial(0.5, 0.5)) if move.kind == "data"} == {2.0}
    # The ceiling sees what waiting does not: workers that take the steps' cores. Of 20 steps, little says nothing.
    assert {move.bound for move in listed(trial(0.0, 1.0, ceiling=1.5)) if move.kind == "data"} == {1.5}
    assert {move.bound for move in listed(trial(0.0, 1.0, ceiling=1.05)) if move.kind == "data"} == {1.0}


def test_workers_are_tried_around_the_number_of_cores_and_beyond_where_batches_wait_for_a_disk() -> None:
    def counts(found: TuneTrial) -> list[str]:
        return [word for move in listed(found) for word in move.settings if word.startswith("loader.num_workers=")]

    fed = trial(0.5, 0.5, **{"loader.backend": "threads", "loader.num_workers": 2, "loader.prefetch_factor": 2})
    assert [word for word in counts(fed) if len(word) == 20] == [
        *("loader.num_workers=2", "loader.num_workers=3", "loader.num_workers=4", "loader.num_workers=1"),
    ]
    # Each device has its part of them.
    two = trial(0.5, 0.5, **{"loader.backend": "threads", "loader.num_workers": 3, "trainer.devices": 2})
    assert "loader.num_workers=2" in counts(two)
    assert "loader.num_workers=4" not in counts(two)
    fed.record.loading["cpu_frac"] = 0.1
    assert "loader.num_workers=8" in counts(fed)
    fed.record.loading["most_workers"] = 3
    assert not {"loader.num_workers=4", "loader.num_workers=8"} & {*counts(fed)}


def test_only_a_card_is_copied_to() -> None:
    knobs = {"loader.backend": "threads", "loader.num_workers": 2, "loader.pin_memory": False}
    on_card = {word for move in listed(trial(0.1, 0.5, copy=0.4, **knobs), CARD) for word in move.settings}
    assert {"loader.pin_memory=true", "loader.device_prefetch=4"} <= on_card
    on_cpu = {word for move in listed(trial(0.1, 0.9, **knobs)) for word in move.settings}
    assert not {"loader.pin_memory=true", "loader.device_prefetch=4"} & on_cpu
    knobs |= {"loader.backend": "torch", "loader.num_workers": 0}  # builds samples in the training process
    in_process = {word for move in listed(trial(0.1, 0.5, copy=0.4, **knobs), CARD) for word in move.settings}
    assert "loader.pin_memory=true" in in_process
    assert "loader.device_prefetch=4" not in in_process
