from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.machines import H200
from wellfed.config.schema import Accelerator, RunConfig, TelemetryConfig, TrainerConfig, WorkloadConfig
from wellfed.observe.machine_facts import GpuFacts, MachineFacts
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.run_plan import DataFacts, ModelFacts, RunPlan
from wellfed.record.entries import RunRecord
from wellfed.run.bookkeeper import Bookkeeper


def gpu(index: int) -> GpuFacts:
    return GpuFacts(index, f"GPU-{index}", "card", 80.0, "9.0", nvml_index=0)


def facts(*gpus: GpuFacts, **more: object) -> MachineFacts:
    return MachineFacts("cpu", 4.0, 16.0, 8.0, gpus=gpus, **more)


def plan(accelerator: str, devices: int = 1) -> RunPlan:
    trainer = {"accelerator": Accelerator[accelerator], "devices": devices}
    config = RunConfig(workload=WorkloadConfig(name="w", effective_batch_size=4), trainer=TrainerConfig(**trainer))
    machine = replace(H200, gpus=tuple(gpu(index) for index in range(devices)))
    data, model = DataFacts(100, has_fetch=True), ModelFacts(0, 0, 0)
    return plan_run(config, {}, machine, plan_device(config, {}, machine), data, model)


@pytest.mark.parametrize(
    ("accelerator", "devices", "watched"), [("gpu", 1, [0]), ("gpu", 2, [0, 1]), ("cpu", 1, [0, 1, 2])]
)
def test_the_gpus_that_train_are_watched_and_beside_the_cpu_all(tmp_path, monkeypatch, accelerator, devices, watched):
    found = []
    monkeypatch.setattr(Sampler, "watch", lambda self, gpus, **_: found.extend(one.index for one in gpus))
    config = RunConfig(workload=WorkloadConfig(name="w", effective_batch_size=4))
    books = Bookkeeper(RunRecord.start("r"), tmp_path, config)
    books.watching(facts(gpu(0), gpu(1), gpu(2)), plan(accelerator, devices))
    assert found == watched


def watched(folder: Path, machine: MachineFacts) -> RunRecord:
    """Returns the record of a run that watches the machine and does nothing else."""
    workload, telemetry = WorkloadConfig(name="w", effective_batch_size=4), TelemetryConfig(interval_s=0.1)
    books = Bookkeeper(RunRecord.start("r"), folder, RunConfig(workload=workload, telemetry=telemetry))
    with books.watching(machine, plan("cpu")):
        pass
    books.saved(0, "last.ckpt", {})
    return books.record


def test_a_driver_that_failed_and_cards_left_out_are_told_at_the_start(tmp_path):
    machine = facts(nvml_failed=True, nvml_problem="driver not loaded", cards_left_out=("card 3 is left out.",))
    events = watched(tmp_path, machine).events
    told = [(event["kind"], event["trouble"], event["message"]) for event in events if event["kind"] != "checkpoint"]
    assert told == [
        ("telemetry_trouble", "refused", "NVML: driver not loaded. GPU figures are absent."),
        ("telemetry_trouble", "refused", "card 3 is left out."),
    ]


def test_a_machine_without_a_driver_is_normal(tmp_path):
    record = watched(tmp_path, facts(nvml_problem="library not found"))
    assert [event["kind"] for event in record.events] == ["checkpoint"]
    assert record.telemetry["interval_s"] == 0.1
