"""What a machine lacks, judged from recorded facts."""

import json

import pytest

from tests.cli.commands.test_doctor import H200, WELL, facts
from wellfed.plan.doctor_checks import Surroundings, examine


def test_no_gpu_is_listed_once_with_the_way_out():
    (entry,) = examine(facts(torch_problem="torch 2.13.0+cpu is built without CUDA"), WELL).missing
    assert entry.what == "gpu"
    assert entry.problem == "no NVIDIA GPU here (NVML: driver not loaded); training runs on the CPU."
    assert "--gpus all" in entry.way_out


@pytest.mark.parametrize(
    ("problem", "way_out"),
    [
        ("none of 1 is visible (CUDA_VISIBLE_DEVICES='')", "Run: unset CUDA_VISIBLE_DEVICES"),
        ("driver and library versions differ, reboot to load the new driver", ""),
        ("nvidia-ml-py is not installed (pip install nvidia-ml-py)", ""),
    ],
)
def test_the_way_to_the_gpu_follows_the_reason(problem, way_out):
    (entry,) = examine(facts(nvml_problem=problem), WELL).missing
    assert problem in entry.problem
    assert entry.way_out == way_out


def test_a_small_shm_names_its_size_and_the_option():
    (entry,) = examine(facts(H200, shm_gib=0.0625, shm_free_gib=0.0625), WELL).missing
    assert entry.problem.startswith("/dev/shm has 64.0 MiB")
    assert "--shm-size=8g" in entry.way_out
    assert examine(facts(H200, shm_gib=None, shm_free_gib=None), WELL).missing == ()
    assert examine(facts(H200, shm_gib=1.0), WELL).missing == ()


def test_software_has_ways_out_to_type():
    missing = examine(facts(H200), Surroundings(False, False)).missing
    assert [entry.what for entry in missing] == ["wandb", "compiler"]
    assert "wandb login" in missing[0].way_out
    assert "g++" in missing[1].way_out


def test_json_is_machine_profile_missing():
    recorded = json.loads(json.dumps(examine(facts(H200), WELL).to_dict()))
    assert list(recorded) == ["machine", "profile", "missing"]
    assert recorded["machine"]["gpus"][0]["uuid"] == "GPU-bbbb"
    assert recorded["profile"]["name"] == "80gb"
    assert recorded["profile"]["budget_gib"] == pytest.approx(125.1)
    assert recorded["profile"]["precision"] == "bf16-mixed"
    recorded = examine(facts(), WELL).to_dict()
    assert recorded["missing"][0].keys() == {"what", "problem", "way_out"}
