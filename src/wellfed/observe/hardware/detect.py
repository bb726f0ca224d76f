"""Detects this machine's hardware. Missing parts are noted in the facts and never raise."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import psutil

from wellfed import __version__
from wellfed.observe.hardware.cgroup import CgroupLimits, cgroup_limits
from wellfed.observe.hardware.facts import SIMULATED, GpuFacts, MachineFacts
from wellfed.observe.hardware.torch_cuda import TorchCuda, TorchDevice
from wellfed.observe.nvml.devices import Device, Devices, list_devices
from wellfed.observe.nvml.session import START_S, LibraryNotFoundError, NvmlError, NvmlSession, within
from wellfed.observe.nvml.visible import same_uuid, visible_devices
from wellfed.units import gib

_DISTRIBUTIONS = "torch lightning hydra-core omegaconf wandb nvidia-ml-py psutil numpy transformers peft torchmetrics"


def machine(
    torch_cuda: TorchCuda | None = None,
    *,
    nvml: NvmlSession | None = None,
    nvml_deadline_s: float = START_S,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> MachineFacts:
    """Returns the facts of this machine. Takes milliseconds: reads files and NVML, starts no process.

    Args:
        torch_cuda: result of ``torch_cuda.torch_cuda()``; None = NVML's cards alone.
        nvml: a session not yet entered; None = the real one.
        nvml_deadline_s: seconds after which the driver counts as absent.
        environ: source of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None = this process's environment.
        root: folder that holds proc, sys and dev.
    """
    environ = os.environ if environ is None else environ
    cards, nvml_error = ask_nvml(nvml or NvmlSession(tries=3), nvml_deadline_s)
    found, left_out = len(cards.devices), cards.notes
    nvml_problem = None
    if nvml_error is not None:
        nvml_problem = nvml_error.reason
    elif not found:
        nvml_problem = left_out[0].rstrip(".") if left_out else "no card found"
    else:
        cards = _visible(cards, environ, torch_cuda)
        if not cards.devices:
            nvml_problem = f"none of {found} is visible (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r})"
    gpus = _merged(cards.devices, torch_cuda)
    warnings = [f"NVML: {note}" for note in cards.notes]
    if any(gpu.is_simulated for gpu in gpus):
        warnings.append("The GPU is simulated: its figures are of no real card.")
    if torch_cuda is not None:
        warnings += torch_cuda.notes
        if torch_cuda.devices and nvml_problem is not None:
            warnings.append(
                f"NVML: {nvml_problem}. Memory is torch's; utilisation, power and clocks are absent. In a container, "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility passes NVML through."
            )
    if hidden := _hidden(environ, torch_cuda, found):
        warnings.append(hidden)
    limits = cgroup_limits(root)
    shm_all_gib, shm_free_gib = shm_gib(root)
    return MachineFacts(
        cpu=_cpu_name(root),
        cpu_quota_cores=cpu_quota_cores(limits, _affinity_cores()),
        ram_gib=gib(_least(psutil.virtual_memory().total, limits.memory_bytes, _rlimit_bytes())),
        ram_available_gib=available_gib(limits),
        shm_gib=shm_all_gib,
        shm_free_gib=shm_free_gib,
        gpus=gpus,
        nvml_problem=nvml_problem,
        cards_left_out=left_out,
        nvml_failed=nvml_error is not None and not isinstance(nvml_error, LibraryNotFoundError),
        torch_problem=None if torch_cuda is None else torch_cuda.problem,
        warnings=tuple(warnings),
        versions=_versions(cards.devices, torch_cuda),
        host=platform.node(),
        os=platform.platform(),
    )


def available_gib(limits: CgroupLimits) -> float:
    """Returns the GiB that the host can still give, or less if a cgroup allows less."""
    return gib(_least(psutil.virtual_memory().available, limits.memory_room_bytes))


def cpu_quota_cores(limits: CgroupLimits, affinity_cores: int) -> float:
    """Returns the cores that this process may keep busy: the smaller of cgroup quota and CPU affinity."""
    return float(_least(affinity_cores, limits.cpu_cores))


def own_quota_cores(root: Path = Path("/")) -> float:
    """Returns `cpu_quota_cores` of this process."""
    return cpu_quota_cores(cgroup_limits(root), _affinity_cores())


def _affinity_cores() -> int:
    # os.cpu_count() ignores the limits of containers and taskset.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count(logical=True) or 1  # macOS, Windows


def ask_nvml(session: NvmlSession, deadline_s: float) -> tuple[Devices, NvmlError | None]:
    """Returns all cards in NVML's order, and the error if they can't be listed."""
    found: list[Devices] = []

    def ask() -> None:
        with session as nvml:
            found.append(list_devices(nvml))

    try:
        within(deadline_s, ask)
    except NvmlError as error:
        if not found:  # otherwise only closing hangs, after the list
            return Devices(()), error
    return found[0], None


def _visible(found: Devices, environ: Mapping[str, str], torch: TorchCuda | None) -> Devices:
    """Returns the cards that CUDA shows, in CUDA's order. The environment decides unless torch gives all UUIDs."""
    devices = torch.devices if torch else ()
    uuids = [device.uuid for device in devices if device.uuid is not None]
    return visible_devices(
        found,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        order=environ.get("CUDA_DEVICE_ORDER"),
        torch_uuids=uuids if uuids and len(uuids) == len(devices) else None,
    )


def _hidden(environ: Mapping[str, str], torch: TorchCuda | None, num_found: int) -> str | None:
    """Returns a warning if CUDA_VISIBLE_DEVICES names cards and none of them exists."""
    # An empty value or -1 hides all cards on purpose. A torch built without CUDA has another reason.
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if torch is None or torch.cuda is None or torch.devices or visible in ("", "-1"):
        return None
    seen = f", and NVML sees {num_found} here" if num_found else ""
    one = f", or name one of 0 to {num_found - 1}" if num_found > 1 else ""
    return (
        f"CUDA_VISIBLE_DEVICES={visible} names no GPU that torch can use{seen}: only the CPU is left. "
        f"Run: unset CUDA_VISIBLE_DEVICES{one}."
    )


def _merged(cards: tuple[Device, ...], torch: TorchCuda | None) -> tuple[GpuFacts, ...]:
    """Returns torch's devices with NVML's facts added, or NVML's cards if torch has none."""
    if torch is None or not torch.devices:
        return tuple(_gpu(card.index or 0, card, card, card.memory_free_bytes) for card in cards)
    gpus = []
    for index, device in enumerate(torch.devices):
        card = next((each for each in cards if each.index == index and _is_same(each, device)), None)
        free_bytes = card.memory_free_bytes if card else None
        gpus.append(_gpu(index, card, device, torch.free_bytes(index) if free_bytes is None else free_bytes))
    return tuple(gpus)


def _is_same(card: Device, device: TorchDevice) -> bool:
    return device.uuid is None or same_uuid(card.uuid, device.uuid)


def _gpu(index: int, card: Device | None, device: Device | TorchDevice, free_bytes: int | None) -> GpuFacts:
    total_bytes, capability = device.memory_total_bytes, device.capability
    if free_bytes is not None and total_bytes is not None:
        free_bytes = min(free_bytes, total_bytes)
    return GpuFacts(
        index=index,
        uuid=card.uuid if card else device.uuid,
        name=device.name,
        memory_gib=None if total_bytes is None else gib(total_bytes),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        free_gib=None if free_bytes is None else gib(free_bytes),
        nvml_index=card.nvml_index if card else None,
        is_mig=card.is_mig if card else False,
        is_simulated=device.name.startswith(SIMULATED),
        holders=tuple(one for one in card.holders if one.pid != os.getpid()) if card else (),
    )


def _rlimit_bytes() -> int | None:
    """Returns the lowest limit on this process's own memory, if any."""
    try:
        import resource
    except ImportError:
        return None  # Windows
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


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


def _versions(cards: tuple[Device, ...], torch: TorchCuda | None) -> dict[str, str]:
    versions = {"python": platform.python_version(), "wellfed": __version__, **installed_versions()}
    if driver := next((card.driver_version for card in cards if card.driver_version), None):
        versions["driver"] = driver
    if torch is not None and torch.cuda:
        versions["cuda"] = torch.cuda
    return versions


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
