import json
from dataclasses import asdict, replace

import pytest

from wellfed.observe.machine_facts import GpuFacts, MachineFacts

GPU = GpuFacts(0, "GPU-1", "NVIDIA H200", 139.8, "9.0", free_gib=100.3, nvml_index=1)
MACHINE = MachineFacts("a CPU", 2.5, 16.0, 12.0, 8.0, 7.0, (GPU,), warnings=("w",), versions={"python": "3.11"})


def test_the_record_finds_what_it_stores():
    recorded = json.loads(json.dumps(asdict(MACHINE)))
    assert {"cpu", "cpu_quota_cores", "ram_gib", "gpus", "versions"} <= recorded.keys()
    assert {"index", "uuid", "name", "memory_gib", "capability"} <= recorded["gpus"][0].keys()


@pytest.mark.parametrize(
    ("memory_gib", "free_gib", "others_gib"), [(8.0, 6.5, 1.5), (8.0, 8.5, 0.0), (8.0, None, 0.0), (None, 3.0, 0.0)]
)
def test_what_others_hold(memory_gib, free_gib, others_gib):
    assert GpuFacts(0, None, "a card", memory_gib, None, free_gib).others_gib == others_gib


def test_a_card_is_named_with_its_size():
    assert GPU.describe() == "NVIDIA H200 (139.8 GiB)"
    assert GpuFacts(0, None, "NVIDIA GB10", None, None).describe() == "NVIDIA GB10"


def test_training_needs_a_card_that_torch_can_use():
    assert MACHINE.training_gpus == (GPU,)
    unusable = replace(MACHINE, torch_problem="built without CUDA")
    assert unusable.gpus == (GPU,)
    assert unusable.training_gpus == ()
