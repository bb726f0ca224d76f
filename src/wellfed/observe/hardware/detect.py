"""Detects this machine's hardware. Missing parts are noted in the facts and never raise."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil

from wellfed import __version__
from wellfed.observe.hardware.cgroup import CgroupLimits, cgroup_limits
from wellfed.observe.hardware.torch_cuda import TorchCuda
from wellfed.observe.machine_facts import SIMULATED, GpuFacts, MachineFacts
from wellfed.observe.nvml.devices import Devices, list_devices
from wellfed.observe.nvml.session import NO_LIBRARY, NvmlError, NvmlSession
from wellfed.observe.nvml.visible import visible_devices
from wellfed.units import gib

_DISTRIBUTIONS = "torch lightning hydra-core omegaconf wandb nvidia-ml-py psutil numpy transformers peft torchmetrics"


def machine(
    torch_cuda: TorchCuda | None = None,
    *,
    nvml: NvmlSession | None = None,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> MachineFacts:
    """Returns the facts of this machine. Takes milliseconds: reads files and NVML, starts no process.

    Args:
        torch_cuda: result of ``torch_cuda.torch_cuda()``; None = NVML's cards alone.
        nvml: a session not yet entered; None = the real one.
        environ: source of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None = this process's environment.
        root: folder that holds proc, sys and dev.
    """
    environ = os.environ if environ is None else environ
    every, nvml_error = ask_nvml(nvml or NvmlSession())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    uuids = [gpu.uuid for gpu in torch_cuda.devices if gpu.uuid is not None] if torch_cuda else []
    order = environ.get("CUDA_DEVICE_ORDER")
    cards = visible_devices(every, visible=visible, order=order, torch_uuids=uuids or None)
    nvml_problem = None
    if nvml_error is not None:
        nvml_problem = nvml_error.reason
    elif not every.devices:
        nvml_problem = every.notes[0].rstrip(".") if every.notes else "no card found"
    elif not cards.devices:
        nvml_problem = f"none of {len(every.devices)} is visible (CUDA_VISIBLE_DEVICES={visible!r})"
    gpus = _merged(cards.devices, torch_cuda)
    warnings = [f"NVML: {note}" for note in cards.notes] if every.devices else []
    if any(gpu.is_simulated for gpu in gpus):
        warnings.append("The GPU is simulated: its figures are of no real card.")
    if torch_cuda is not None:
        warnings += torch_cuda.notes
        # An empty value or -1 hides all cards on purpose.
        if torch_cuda.cuda is not None and not torch_cuda.devices and (visible or "").strip() not in ("", "-1"):
            warnings.append(
                f"CUDA_VISIBLE_DEVICES={visible} names no GPU that torch can use (NVML sees {len(every.devices)}): "
                "only the CPU is left. Run: unset CUDA_VISIBLE_DEVICES."
            )
        if torch_cuda.devices and nvml_problem is not None:
            warnings.append(
                f"NVML: {nvml_problem}. Memory is torch's; utilisation, power and clocks are absent. In a container, "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility passes NVML through."
            )
    versions = {"python": platform.python_version(), "wellfed": __version__, **installed_versions()}
    versions |= {"driver": cards.driver or "", "cuda": (torch_cuda and torch_cuda.cuda) or ""}
    limits = cgroup_limits(root)
    shm_all_gib, shm_free_gib = shm_gib(root)
    return MachineFacts(
        cpu=_cpu_name(root),
        cpu_quota_cores=own_quota_cores(limits),
        ram_gib=gib(_least(psutil.virtual_memory().total, limits.memory_bytes)),
        ram_available_gib=available_gib(limits),
        shm_gib=shm_all_gib,
        shm_free_gib=shm_free_gib,
        gpus=gpus,
        nvml_problem=nvml_problem,
        cards_left_out=every.notes,
        nvml_failed=nvml_error is not None and nvml_error.code != NO_LIBRARY,
        torch_problem=None if torch_cuda is None else torch_cuda.problem,
        warnings=tuple(warnings),
        versions={name: version for name, version in versions.items() if version},
        host=platform.node(),
        os=platform.platform(),
    )


def available_gib(limits: CgroupLimits) -> float:
    """Returns the GiB that the host can still give, or less if a cgroup allows less."""
    return gib(_least(psutil.virtual_memory().available, limits.memory_room_bytes))


def own_quota_cores(limits: CgroupLimits | None = None) -> float:
    """Returns the cores that this process may keep busy: the smaller of cgroup quota and CPU affinity."""
    limits = cgroup_limits() if limits is None else limits
    if hasattr(os, "sched_getaffinity"):  # os.cpu_count() ignores the limits of containers and taskset
        return float(_least(len(os.sched_getaffinity(0)), limits.cpu_cores))
    return float(psutil.cpu_count(logical=True) or 1)  # macOS, Windows


def ask_nvml(session: NvmlSession) -> tuple[Devices, NvmlError | None]:
    """Returns all cards in NVML's order, and the error if they can't be listed."""
    try:
        with session as nvml:
            return list_devices(nvml), None
    except NvmlError as error:
        return Devices(()), error


def _merged(cards: tuple[GpuFacts, ...], torch: TorchCuda | None) -> tuple[GpuFacts, ...]:
    """Returns torch's devices with NVML's facts added, or NVML's cards if torch has none."""
    others = [replace(card, holders=tuple(one for one in card.holders if one.pid != os.getpid())) for card in cards]
    by_index = {card.index: card for card in others}
    found = []
    for gpu in torch.devices if torch is not None else ():
        card = by_index.get(gpu.index, gpu)
        free_gib = None if card.free_gib is None else _least(card.free_gib, gpu.memory_gib)
        known = replace(card, name=gpu.name, memory_gib=gpu.memory_gib, capability=gpu.capability, free_gib=free_gib)
        found.append(replace(known, is_simulated=gpu.name.startswith(SIMULATED)))
    return tuple(found or others)


def shm_gib(root: Path = Path("/")) -> tuple[float, float] | tuple[None, None]:
    """Returns size and free space of /dev/shm in GiB; a read-only one has no free space."""
    try:
        status = os.statvfs(root / "dev/shm")
    except (AttributeError, OSError):  # Windows, macOS
        return None, None
    free = 0 if status.f_flag & os.ST_RDONLY else status.f_bavail * status.f_frsize
    return gib(status.f_blocks * status.f_frsize), gib(free)


def _cpu_name(root: Path) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # ARM kernels write no model name.
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@cache
def installed_versions() -> dict[str, str]:
    """Returns installed versions, cached, since finding them reads a dozen files."""
    found = {}
    for name in _DISTRIBUTIONS.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _least(first: float, *others: float | None) -> float:
    return min([first, *(each for each in others if each is not None)])
