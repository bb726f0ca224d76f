"""Lines and table of a profile: what was seen, and no more."""

from typing import Any

import pytest

from tests.kit.evidence_of import walled
from wellfed.explain.report.run_lines import machine_lines, sections, wall_lines
from wellfed.explain.report.run_page import tiles
from wellfed.explain.report.write import to_markdown
from wellfed.record.entries import PlanEntry, ProfileEntry, RunRecord

SEEN: ProfileEntry = {
    "steps": 10,
    "by": "device",
    "step_ms": 32.125,
    "operations": [
        {"name": "aten::mm", "calls": 40, "ms_per_step": 12.5, "share_frac": 0.625},
        {"name": "void at::native::" + "x" * 200, "calls": 5, "ms_per_step": 7.5, "share_frac": 0.375},
    ],
    "device_busy_frac": 0.9,
    "copy_ms_per_step": 1.25,
}
TRACE = "each of their operations: profile/trace.json of the run folder, for https://ui.perfetto.dev"
UNSEEN: Any = {
    **SEEN,
    "by": "cpu",
    **dict.fromkeys(("device_busy_frac", "copy_ms_per_step")),
}


def record_of(profile: ProfileEntry | None, accelerator: str = "gpu", asked: int = 10) -> RunRecord:
    entry: PlanEntry = {"value": accelerator, "because": "", "source": "set"}
    config = {"trainer": {"profile_steps": asked}}
    return RunRecord("r", profile=profile, plan={"trainer.accelerator": entry}, config=config)


def lines_of(record: RunRecord, name: str) -> list[str]:
    (section,) = (one for one in sections(record) if one.name == name)
    return list(section.lines)


def test_how_host_and_gpu_work_together_is_told_and_where_the_host_waits() -> None:
    record = record_of(SEEN)
    record.synchronisations = [{"place": "model.py:12", "per_step": 2.0}, {"place": "wellfed/a.py:3", "per_step": 0.5}]
    assert lines_of(record, "profile") == [
        "10 steps recorded, 32.12 ms each: recording costs time, too",
        "the GPU ran kernels 90.0 % of the time; copies take 1.25 ms a step",
        "model.py:12 makes the host wait for the GPU, 2 times a step",
        "wellfed/a.py:3 makes the host wait for the GPU, every 2 steps",
        TRACE,
    ]


def test_a_run_without_a_profile_has_no_word_of_it() -> None:
    record = record_of(None)
    assert "## Profile" not in to_markdown(record)


def test_of_many_gpus_the_idlest_have_a_line_and_those_of_a_kind_one_together() -> None:
    record = RunRecord("run")
    gpus = [{"index": index, "name": "A card", "memory_gib": 80.0, "capability": "9.0"} for index in range(40)]
    record.machine = {"gpus": gpus}
    record.gpus = {str(gpu): {"util_pct": {"mean": 50.0 + gpu % 20, "p5": 1.0, "p95": 99.0}} for gpu in range(40)}
    first, second, *lines = lines_of(record, "utilisation")
    assert first == "40 GPUs: 50-69 % (p5 1, p95 99)"
    assert second == "run.json has all 40 GPUs; here are the 16 idlest"
    assert [int(line.split()[1]) for line in lines] == [*range(8), *range(20, 28)]
    assert machine_lines(record)[0] == "40 GPUs: A card, 80.0 GiB"
    record.gpus, record.machine["gpus"] = {"0": record.gpus["0"]}, gpus[:2]
    assert lines_of(record, "utilisation") == ["GPU: 50 % (p5 1, p95 99)", "GPU 0 A card: utilisation 50 %"]
    assert machine_lines(record)[0] == "2 GPUs: A card, 80.0 GiB"


def test_where_the_wall_time_went_is_one_line_if_it_was_not_steps() -> None:
    wall = walled(steps_s=1.0, validation_s=16.0, start_s=2.9, callbacks={"Ema.on_fit_start": 0.1})
    told = "the 20.0 s of training: steps 5.0 %, validations 80.0 %, start 14.5 %"
    assert wall_lines(RunRecord("r", wall=wall)) == [told]
    assert told in to_markdown(RunRecord("r", wall=wall))
    hooks = {"Own.on_train_epoch_end": 9.0}
    assert wall_lines(RunRecord("r", wall=walled(steps_s=1.0, callbacks=hooks))) == [
        "the 10.0 s of training: steps 10.0 %, Own.on_train_epoch_end 90.0 %"
    ]
    assert wall_lines(RunRecord("r", wall=walled(steps_s=97.0, validation_s=3.0))) == []
    assert wall_lines(RunRecord("r")) == []


@pytest.mark.parametrize(
    ("accelerator", "first"), [("cpu", "CPU: 2.0 of 4 cores"), ("gpu", "GPU: 50 % (p5 1, p95 99)")]
)
def test_a_run_on_the_cpu_shows_the_host_and_not_the_gpus_that_others_use(accelerator: str, first: str) -> None:
    record = record_of(None, accelerator)
    record.gpus = {"0": {"util_pct": {"mean": 50.0, "p5": 1.0, "p95": 99.0}}}
    record.host, record.machine = {"cpu_pct": 200.0, "rss_gib": 1.0}, {"cpu_quota_cores": 4.0}
    assert lines_of(record, "utilisation")[0] == first
    (tile,) = tiles(record)
    assert tile.label == ("CPU" if accelerator == "cpu" else "GPU")
