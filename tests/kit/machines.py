"""Recorded machines to plan for."""

from wellfed.observe.machine_facts import GpuFacts, Holder, MachineFacts

GIB = 2**30


def card(index=0, *, name="NVIDIA H200", memory_gib=139.8, capability="9.0", held_gib=0.0, by=()):
    """``by``: (pid, name, GiB) of those who hold it."""
    holders = tuple(Holder(*holder) for holder in by)
    free_gib = memory_gib - held_gib
    return GpuFacts(index, f"GPU-{index}", name, memory_gib, capability, free_gib, nvml_index=index, holders=holders)


def machine(*cards, cores=8.0, ram_gib=32.0, **more):
    problem = None if cards else "driver not loaded"
    return MachineFacts("A CPU", cores, ram_gib, ram_gib * 0.75, gpus=cards, nvml_problem=problem, **more)


LAPTOP = machine(cores=4.0, ram_gib=16.0)
SMALL = machine(card(name="RTX 3070", memory_gib=7.6, capability="8.6"), cores=6.0)
H200 = machine(card(), cores=64.0, ram_gib=512.0)
TWO = machine(card(0), card(1), cores=16.0, ram_gib=256.0)
