"""What doctor and gpu=auto make of cards that the real pynvml finds on a driver library that plays scenarios."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wellfed
from tests.fake_nvml.driver import DRIVER_NOT_LOADED, MISMATCH, UNKNOWN, FakeGpu, FakeMig, Scenario
from tests.kit.few import slow
from wellfed.config.compose import compose
from wellfed.errors import ConfigError
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.profiles import resolve_budget
from wellfed.plan.device import plan_device

RTX = FakeGpu("GPU-4090aaaa", "NVIDIA GeForce RTX 4090", 24, 1.5, 0.25, (8, 9))
H200 = FakeGpu("GPU-200bbbb", "NVIDIA H200", 140.5, 20, 0.5, (9, 0))


@pytest.fixture(scope="module")
def without_gpu():
    """Skips where torch has a card: doctor then shows torch's cards, and not the scenario's."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a real GPU here")


def doctor(fake_driver, scenario, *arguments, **variables):
    """The output of doctor, run the way a user types it, with the variables set."""
    environment = fake_driver.environment(scenario)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        environment.pop(name, None)
    paths = [str(Path(wellfed.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    command = [sys.executable, "-m", "wellfed", "doctor", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("visible", [slow("1,0"), "GPU-200bbbb,GPU-4090"])
def test_two_different_cards_are_shown_in_cudas_order(fake_driver, visible):
    scenario = Scenario([RTX, H200], driver="580.65.06")
    variables = {"CUDA_VISIBLE_DEVICES": visible}
    found = json.loads(doctor(fake_driver, scenario, "--json", **variables))
    first, second = found["machine"]["gpus"]
    assert (first["index"], first["nvml_index"], first["name"]) == (0, 1, "NVIDIA H200")
    assert (second["index"], second["nvml_index"], second["name"]) == (1, 0, "NVIDIA GeForce RTX 4090")
    assert [first["uuid"], second["uuid"]] == ["GPU-200bbbb", "GPU-4090aaaa"]
    assert [first["memory_gib"], first["free_gib"]] == [140, 120]
    assert [second["memory_gib"], second["free_gib"]] == [23.75, 22.25]
    assert [first["capability"], second["capability"]] == ["9.0", "8.9"]
    assert found["machine"]["versions"]["driver"] == "580.65.06"
    assert found["machine"]["nvml_problem"] is None
    warnings = found["machine"]["warnings"]
    by_number = visible == "1,0"  # CUDA may count different cards in another order
    assert ["CUDA_DEVICE_ORDER=PCI_BUS_ID" in each for each in warnings] == [True] * by_number
    assert found["missing"][0]["what"] == "torch"
    assert found["missing"][0]["problem"].startswith("torch can't use NVIDIA H200 (140.0 GiB): torch ")
    assert found["profile"]["name"] == "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("without_gpu")
def test_people_read_first_that_torch_can_not_use_the_card(fake_driver):
    held = dataclasses.replace(H200, processes=[(4711, 18.5, "/usr/bin/ollama")])
    shown = doctor(fake_driver, Scenario([RTX, held]), CUDA_VISIBLE_DEVICES="1")
    assert "held by ollama (pid 4711, 18,944 MiB)" in " ".join(shown.split())
    assert shown.startswith("torch can't use NVIDIA H200 (140.0 GiB): torch ")
    assert "NVIDIA H200 (140.0 GiB), 120.0 free, capability 9.0, GPU-200bbbb" in " ".join(shown.split())


def facts_of(fake_driver, *gpus, visible=None, **scenario):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with fake_driver.load(Scenario(gpus, **scenario)) as driver:
        facts = machine(environ=environ)
        assert driver.num_users() == 0
    return facts


@pytest.mark.parametrize(
    ("name", "total_gib", "reserved_gib", "capability", "profile"),
    [
        ("NVIDIA GeForce RTX 4060", 8, 0.25, (8, 9), "8gb"),
        ("NVIDIA GeForce RTX 4090", 24, 0.375, (8, 9), "24gb"),
        ("NVIDIA H200", 140.4, 0.6, (9, 0), "80gb"),
    ],
)
@pytest.mark.parametrize("held_gib", [0, 2.5])
def test_auto_is_the_cards_profile_and_nine_tenths_of_what_others_leave(
    fake_driver, name, total_gib, reserved_gib, capability, profile, held_gib
):
    card = FakeGpu("GPU-1", name, total_gib, held_gib, reserved_gib, capability)
    facts = facts_of(fake_driver, card)
    assert facts.gpus[0].memory_gib == pytest.approx(total_gib - reserved_gib)
    assert facts.gpus[0].others_gib == pytest.approx(held_gib)
    budget = resolve_budget("auto", None, None, facts)
    assert (budget.profile, budget.cap) == (profile, False)
    assert name in budget.because
    assert budget.budget_gib == pytest.approx(0.9 * (total_gib - reserved_gib - held_gib))
    assert f"{held_gib:.1f} held by other processes" in budget.because
    assert budget.warnings == ()


def test_auto_sizes_for_the_visible_card(fake_driver):
    for visible, profile in [("1", "80gb"), ("0", "24gb"), ("1,0", "80gb"), ("GPU-4090", "24gb")]:
        budget = resolve_budget("auto", None, None, facts_of(fake_driver, RTX, H200, visible=visible))
        assert (visible, budget.profile) == (visible, profile)
    both = facts_of(fake_driver, RTX, H200, visible="1,0")
    budget = resolve_budget("auto", None, None, both, num_devices=2)
    assert (budget.profile, budget.budget_gib) == ("24gb", pytest.approx(0.9 * 22.25))


def test_auto_sizes_for_an_instance_of_a_split_card(fake_driver):
    split = FakeGpu("GPU-split", "NVIDIA H200", 140, mig=[FakeMig("MIG-1", "NVIDIA H200 MIG 1g.18gb", 16.5, 1, 0.5)])
    facts = facts_of(fake_driver, split)
    assert [(gpu.index, gpu.uuid, gpu.is_mig, gpu.capability) for gpu in facts.gpus] == [(0, "MIG-1", True, "9.0")]
    budget = resolve_budget("auto", None, None, facts)
    assert (budget.profile, budget.budget_gib) == ("16gb", pytest.approx(0.9 * 15))


@pytest.mark.parametrize(
    ("scenario", "visible", "problem"),
    [
        ({"init_error": DRIVER_NOT_LOADED}, None, "driver not loaded"),
        ({"init_error": MISMATCH}, None, "driver and library versions differ, reboot to load the new driver"),
        ({}, "GPU-none", "none of 2 is visible (CUDA_VISIBLE_DEVICES='GPU-none')"),
        ({}, "", "none of 2 is visible (CUDA_VISIBLE_DEVICES='')"),
    ],
)
def test_no_card_ends_on_the_cpu_with_the_reason(fake_driver, scenario, visible, problem):
    facts = facts_of(fake_driver, RTX, H200, visible=visible, **scenario)
    assert (facts.gpus, facts.nvml_problem) == ((), problem)
    budget = resolve_budget("auto", None, None, facts)
    assert (budget.profile, budget.budget_gib) == ("cpu", None)
    assert problem in budget.because


def test_a_card_that_fails_is_a_warning_and_the_others_count(fake_driver):
    failing = FakeGpu("GPU-failing", errors={"nvmlDeviceGetUUID": UNKNOWN})
    facts = facts_of(fake_driver, failing, RTX)
    assert [(gpu.index, gpu.nvml_index, gpu.name) for gpu in facts.gpus] == [(0, 1, "NVIDIA GeForce RTX 4090")]
    assert facts.warnings == ("NVML: card 0 is left out (NVML nvmlDeviceGetUUID: unknown error).",)


def test_a_card_that_is_full_stops_a_run_before_its_data_is_read_with_the_holders_name(fake_driver):
    full = FakeGpu("GPU-full", "NVIDIA GeForce RTX 4090", 24, 23.9, 0.0, (8, 9), processes=[(4711, 23.5, "/opt/comfy")])
    with fake_driver.load(Scenario([full])):
        facts = machine(environ={})
    with pytest.raises(ConfigError) as raised:
        plan_device(compose([]).config, {"gpu": "auto"}, facts)
    (fault,) = raised.value.faults
    assert "other processes hold 23.9 GiB of NVIDIA GeForce RTX 4090 (24.0 GiB)" in str(fault)
    assert "comfy (pid 4711, 24,064 MiB)" in str(fault)
    assert "End them" in str(fault)
