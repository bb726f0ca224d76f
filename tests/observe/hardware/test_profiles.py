import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.machines import H200, LAPTOP, SMALL
from wellfed.errors import Fault
from wellfed.observe.hardware.profiles import (
    PROFILES,
    PrecisionChoice,
    pick_profile,
    resolve_budget,
    resolve_precision,
    with_cards,
)
from wellfed.observe.machine_facts import GpuFacts, Holder, MachineFacts


def gpu(memory_gib, *, held_gib=0.0, name="NVIDIA H200", capability="9.0", index=0):
    free_gib = None if memory_gib is None else memory_gib - held_gib
    return GpuFacts(index, f"GPU-{index}", name, memory_gib, capability, free_gib, nvml_index=index)


def facts(*gpus, nvml_problem=None, torch_problem=None):
    problem = nvml_problem or (None if gpus else "driver not loaded")
    return MachineFacts("cpu", 4.0, 16, 12, gpus=gpus, nvml_problem=problem, torch_problem=torch_problem)


def budget(profile, machine, memory_gib=None, enforce=None, **more):
    return resolve_budget(profile, memory_gib, enforce, machine, **more)


@pytest.mark.parametrize(
    ("card_gib", "profile"),
    [(7.4, "8gb"), (14.4, "8gb"), (14.5, "16gb"), (21.9, "16gb"), (22, "24gb"), (74.9, "24gb"), (75, "80gb")],
)
def test_profile_of_each_card(card_gib, profile):
    assert pick_profile(card_gib).name == profile
    assert budget("auto", facts(gpu(card_gib))).profile == profile


def test_budgets_are_nine_tenths_of_nominal():
    assert {name: profile.budget_gib for name, profile in PROFILES.items()} == {
        "8gb": 7.2,
        "16gb": 14.4,
        "24gb": 21.6,
        "80gb": 72.0,
    }


def test_auto_takes_what_others_leave_and_does_not_cap():
    found = budget("auto", facts(gpu(139.8, held_gib=39.8)))
    assert found.budget_gib == pytest.approx(90.0)
    assert (found.profile, found.cap, found.warnings) == ("80gb", False, ())
    assert found.because == "0.9 x (139.8 GiB of NVIDIA H200 - 39.8 held by other processes)"
    held = dataclasses.replace(gpu(139.8, held_gib=39.8), holders=(Holder(7, "python", 39.5),))
    assert budget("auto", facts(held)).because.endswith("39.8 held by other processes: python (pid 7, 40,448 MiB))")


@given(total=st.floats(1, 300), held_frac=st.floats(0, 1), profile=st.sampled_from(["auto", *PROFILES, "mine"]))
def test_a_budget_never_exceeds_what_the_card_has(total, held_frac, profile):
    found = budget(profile, facts(gpu(total, held_gib=total * held_frac)))
    assert 0 <= found.budget_gib <= total * (1 - held_frac) + 1e-9
    assert found.cap == (profile in PROFILES and found.budget_gib == PROFILES[profile].budget_gib)


def test_a_named_profile_caps_a_larger_card_and_names_both():
    found = budget("24gb", facts(gpu(139.8)))
    assert (found.budget_gib, found.profile, found.cap) == (21.6, "24gb", True)
    (warning,) = found.warnings
    assert "NVIDIA H200 (139.8 GiB), whose profile is 80gb" in warning
    assert "21.6 GiB and capping the allocator" in warning


def test_a_profile_larger_than_the_card_becomes_what_it_has():
    found = budget("24gb", facts(gpu(7.6, name="RTX 3070")))
    assert found.budget_gib == pytest.approx(6.84)
    assert (found.profile, found.cap) == ("24gb", False)
    (warning,) = found.warnings
    assert "RTX 3070 (7.6 GiB)" in warning
    assert "6.8 GiB it has instead of 21.6. gpu=auto" in warning


def test_a_typed_budget_wins_over_the_profiles():
    found = budget("24gb", facts(gpu(23.6)), memory_gib=10.0)
    assert (found.budget_gib, found.profile, found.cap, found.warnings) == (10.0, "24gb", True, ())
    assert found.because.startswith("gpu.memory_gib=10 on ")
    found = budget("auto", facts(gpu(23.6)), memory_gib=10.0)
    assert (found.budget_gib, found.profile, found.cap) == (10.0, "24gb", True)
    found = budget("auto", facts(gpu(23.6)), memory_gib=30.0)
    assert found.budget_gib == pytest.approx(21.24)
    assert found.warnings[0].startswith("gpu.memory_gib=30: this card is")


def test_the_smallest_of_the_cards_in_use_decides():
    machine = facts(gpu(139.8), gpu(23.6, name="RTX 4090", index=1), gpu(7.6, index=2))
    assert "NVIDIA H200" in budget("auto", machine).because
    assert "RTX 4090" in budget("auto", machine, num_devices=2).because
    assert "NVIDIA H200" in budget("auto", machine, num_devices=0).because


def test_a_named_profile_without_a_gpu_plans_for_it():
    found = budget("24gb", facts())
    assert (found.budget_gib, found.profile, found.cap) == (21.6, "24gb", False)
    (warning,) = found.warnings
    assert "no NVIDIA GPU here (NVML: driver not loaded); training on the CPU" in warning
    assert "trainer.accelerator=gpu" in warning
    assert "gpu=auto" in warning
    assert not budget("24gb", facts(), enforce=True).cap
    (warning,) = budget("auto", facts(), memory_gib=8.0).warnings
    assert "gpu=auto" not in warning


def test_auto_without_a_gpu_is_normal():
    found = budget("auto", facts())
    assert (found.budget_gib, found.profile, found.cap) == (None, "cpu", False)
    assert found.warnings == ()
    assert "NVML: driver not loaded" in found.because


def test_a_card_that_torch_cannot_use_is_named():
    machine = facts(gpu(139.8), torch_problem="torch 2.13.0+cpu is built without CUDA")
    seen = "torch can't use NVIDIA H200 (139.8 GiB) (torch 2.13.0+cpu is built without CUDA); training on the CPU"
    assert budget("auto", machine).profile == "cpu"
    assert budget("auto", machine).warnings == (f"gpu=auto: {seen}. gpu=cpu says so without this warning.",)
    assert budget("8gb", machine).warnings[0].startswith(f"gpu=8gb: {seen}, the budget of 7.2 GiB is not enforced.")


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ("6.1", "32-true"),
        ("7.5", "16-mixed"),
        ("8.0", "bf16-mixed"),
        ("10.0", "bf16-mixed"),  # as text it sorts before 8.0
        (None, "32-true"),
    ],
)
def test_auto_precision(capability, precision):
    choice = resolve_precision("auto", gpu(16, capability=capability))
    assert isinstance(choice, PrecisionChoice)
    assert choice.precision == precision
    assert (f"capability {capability}" in choice.because) == (capability is not None)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA GeForce GTX 1660 SUPER", "32-true"),
        ("NVIDIA GeForce MX450", "32-true"),
        ("Quadro T1000", "32-true"),
        ("NVIDIA GeForce RTX 2060", "16-mixed"),
        ("Tesla T4", "16-mixed"),
    ],
)
def test_auto_takes_fp16_only_with_tensor_cores(name, precision):
    choice = resolve_precision("auto", gpu(6, name=name, capability="7.5"))
    assert (choice.precision, "no tensor cores" in choice.because) == (precision, precision == "32-true")
    assert name in choice.because


@pytest.mark.parametrize(
    ("asked", "capability"),
    [
        ("32-true", None),
        ("16-mixed", "6.1"),
        ("bf16-mixed", "8.0"),
        ("bf16-true", "8.6"),
        ("bf16-mixed", "cpu"),
        ("32-true", "cpu"),
    ],
)
def test_a_typed_precision_that_the_device_can_do(asked, capability):
    device = None if capability == "cpu" else gpu(16, capability=capability)
    choice = resolve_precision(asked, device)
    assert isinstance(choice, PrecisionChoice)
    assert choice.precision == asked


def test_a_typed_precision_is_refused_on_the_cpu():
    found = resolve_precision("16-mixed", None)
    assert isinstance(found, Fault)
    assert (found.where, "gpu.precision=auto" in found.way_out) == ("gpu.precision", True)


@pytest.mark.parametrize("asked", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("capability", ["6.1", "7.0", "7.5"])
def test_bf16_is_refused_before_capability_8(asked, capability):
    found = resolve_precision(asked, gpu(16, name="Tesla T4", capability=capability))
    assert isinstance(found, Fault)
    assert f"Tesla T4 (capability {capability})" in found.problem
    assert "gpu.precision=16-mixed" in found.way_out


@pytest.mark.parametrize(
    ("facts", "profile", "memory_gib", "devices"),
    [
        (LAPTOP, "auto", None, 1),  # nothing says what card to think of
        (LAPTOP, "cpu", None, 1),
        (H200, "auto", None, 1),
        (H200, "8gb", 7.2, 1),  # a larger card rehearses a smaller one
    ],
)
def test_a_machine_that_can_do_it_stays_as_it_is(facts, profile, memory_gib, devices):
    assert with_cards(facts, profile, memory_gib, devices) == (facts, None)


@pytest.mark.parametrize(
    ("facts", "profile", "memory_gib", "devices", "size", "said"),
    [
        (LAPTOP, "8gb", 7.2, 1, 8, "a card of 8 GiB and capability 8.0; not in this machine"),
        (LAPTOP, "80gb", 72.0, 8, 80, "8 x a card of 80 GiB"),
        (LAPTOP, "auto", 5.0, 2, 5.0, "2 x a card of 5 GiB"),
        (LAPTOP, "24gb", 10.0, 1, 10.0, "a card of 10 GiB"),
        (SMALL, "24gb", 21.6, 1, 24, "a card of 24 GiB and capability 8.0; not in this machine"),
        (H200, "auto", None, 4, 139.8, "4 x NVIDIA H200 (139.8 GiB); this machine has 1"),
        (H200, "24gb", 21.6, 4, 139.8, "4 x NVIDIA H200"),
    ],
)
def test_what_is_missing_is_thought_of_and_said(facts, profile, memory_gib, devices, size, said):
    found, sentence = with_cards(facts, profile, memory_gib, devices)
    assert said in sentence
    assert [gpu.index for gpu in found.training_gpus] == list(range(devices))
    assert {gpu.memory_gib for gpu in found.training_gpus} == {size}
    assert all(gpu.others_gib == 0 and gpu.holders == () for gpu in found.training_gpus)
    assert (found.cpu, found.ram_gib) == (facts.cpu, facts.ram_gib)
