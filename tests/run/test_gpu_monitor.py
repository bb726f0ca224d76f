from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.machines import H200
from wellfed.config.schema import Accelerator, RunConfig, TelemetryConfig, TrainerConfig, WorkloadConfig
from wellfed.observe.hardware.facts import GpuFacts, MachineFacts
from wellfed.observe.telemetry.gpu import WatchedGpu
from wellfed.plan.decide import plan_run
from wellfed.plan.device import plan_device
from wellfed.plan.run_plan import DataFacts, ModelFacts, RunPlan
from wellfed.record.entries import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.gpu_monitor import gpus_to_watch


def gpu(index: int, *, uuid: str | None = "GPU", nvml_index: int | None = 0, is_mig: bool = False) -> GpuFacts:
    uuid = None if uuid is None else f"{uuid}-{index}"
    return GpuFacts(index, uuid, "card", 80.0, "9.0", nvml_index=nvml_index, is_mig=is_mig)


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
def test_the_gpus_that_train_are_watched_and_beside_the_cpu_all(accelerator, devices, watched):
    found = gpus_to_watch(facts(gpu(0), gpu(1), gpu(2)), plan(accelerator, devices))
    assert found == [WatchedGpu(index, f"GPU-{index}") for index in watched]


def test_what_nvml_does_not_know_cannot_be_watched():
    machine = facts(gpu(0, uuid=None), gpu(1, nvml_index=None), gpu(2, uuid="MIG", is_mig=True))
    assert gpus_to_watch(machine, plan("cpu")) == [WatchedGpu(2, "MIG-2", is_mig=True)]


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
