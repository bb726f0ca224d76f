"""Who builds batches, how many of them ahead, and how they reach the device."""

from __future__ import annotations

from collections.abc import Mapping

from wellfed.config.schema import Backend, LoaderConfig, RunConfig
from wellfed.errors import Fault
from wellfed.hardware.facts import MachineFacts
from wellfed.planning.planned import DataFacts, Planned, as_set, planned

_WORKER_LIMIT: Mapping[str, int] = {"balanced": 4, "aggressive": 16}
"""Most producers of a loader option."""
_MOST_WORKERS = 8
"""Most producers of the others."""


def plan_loader(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    data: DataFacts,
    on_gpu: bool,
    faults: list[Fault],
    warnings: list[str],
) -> dict[str, Planned]:
    """``loader.*`` as it will be done; what can't be goes into ``faults``, what is ignored into ``warnings``."""
    loader = config.loader
    backend = _backend(loader, data, warnings)
    if backend.value == "threads" and not data.has_fetch:
        faults.append(
            Fault(
                "loader.backend",
                "threads needs training data with fetch(indices, rng); this has only __getitem__.",
                "Set loader.backend=processes, or give the dataset fetch.",
            )
        )
    num_workers = _num_workers(config, choices, facts, backend=backend.value, data=data, warnings=warnings)
    builds_ahead = num_workers.value > 0
    has_processes = builds_ahead and backend.value in ("torch", "processes")
    if loader.device_prefetch and on_gpu:
        warnings.append(
            f"loader.device_prefetch={loader.device_prefetch} is not used: batches are copied on the compute stream."
        )
    return {
        "loader.backend": backend,
        "loader.num_workers": num_workers,
        "loader.prefetch_factor": planned(
            loader.prefetch_factor or 2,
            as_set("loader.prefetch_factor", loader.prefetch_factor) or "torch's default",
            loader.prefetch_factor is not None,
        )
        if builds_ahead
        else Planned(None, "nobody builds ahead", "predicted"),
        "loader.persistent_workers": _persistent(loader.persistent_workers, has_processes),
        "loader.pin_memory": _pin(loader.pin_memory, on_gpu),
        "loader.device_prefetch": Planned(
            0, "copied on the compute stream" if on_gpu else "no device to copy to", "predicted"
        ),
        "loader.timeout_s": planned(
            loader.timeout_s or 0,
            as_set("loader.timeout_s", loader.timeout_s) or "waits for ever",
            loader.timeout_s is not None,
        )
        if builds_ahead
        else Planned(0, "built when asked for: there is no producer to wait for", "predicted"),
        "loader.worker_threads": planned(
            loader.worker_threads,
            as_set("loader.worker_threads", loader.worker_threads) or "torch's default: one in a worker process",
            loader.worker_threads is not None,
        )
        if has_processes
        else Planned(None, "no worker processes: the training process has one count of threads", "predicted"),
    }


def _backend(loader: LoaderConfig, data: DataFacts, warnings: list[str]) -> Planned:
    asked = loader.backend
    if data.is_iterable:
        if asked not in (Backend.auto, Backend.inline):
            warnings.append(
                f"loader.backend={asked.value} is not used: the training data is an iterable, which makes its own "
                "batches. Give it __getitem__ and __len__ for producers."
            )
        return Planned("inline", "the training data is an iterable with its own batches", "predicted")
    if asked is not Backend.auto:
        return Planned(asked.value, f"loader.backend={asked.value}", "set")
    if loader.num_workers == 0:
        name = "inline" if data.has_fetch else "torch"
        return Planned(name, "loader.num_workers=0: built in the training process", "predicted")
    if not data.has_fetch:
        return Planned("processes", "only __getitem__: Python's lock would let threads take turns", "predicted")
    if loader.num_workers or loader.prefetch_factor:
        ahead = as_set("loader.num_workers", loader.num_workers) or f"loader.prefetch_factor={loader.prefetch_factor}"
        return Planned("threads", f"fetch gives whole batches, and {ahead} asks for some ahead", "predicted")
    return Planned("inline", "fetch gives whole batches: cheaper built than handed over", "predicted")


def _num_workers(
    config: RunConfig,
    choices: Mapping[str, str],
    facts: MachineFacts,
    *,
    backend: str,
    data: DataFacts,
    warnings: list[str],
) -> Planned:
    asked, devices, cores = config.loader.num_workers, config.trainer.devices, facts.cpu_quota_cores
    if data.is_iterable and asked:
        warnings.append(f"loader.num_workers={asked} is not used: the training data is an iterable.")
    if backend == "inline":
        return planned(0, "built in the training process", asked == 0)
    own = max(1, int(cores / devices) - 1)
    if asked is None:
        limit = _WORKER_LIMIT.get(choices.get("loader", ""), _MOST_WORKERS)
        each = f"{cores:g} cores" if devices == 1 else f"{cores:g} cores / {devices} devices"
        return Planned(min(limit, own), f"{each} less one for training, at least 1, at most {limit}", "predicted")
    if asked * devices > cores and asked > own:
        each = "" if devices == 1 else f" on each of {devices} devices"
        warnings.append(
            f"loader.num_workers={asked}{each} is more than the {cores:g} CPU cores this process may use; "
            f"producers will take turns. loader.num_workers={own} leaves one for the training process."
        )
    return Planned(asked, f"loader.num_workers={asked}", "set")


def _persistent(asked: bool | None, has_processes: bool) -> Planned:
    if not has_processes:
        return Planned(False, "no worker processes", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.persistent_workers={str(asked).lower()}", "set")
    return Planned(True, "worker processes live on from epoch to epoch", "predicted")


def _pin(asked: bool | None, on_gpu: bool) -> Planned:
    if not on_gpu:
        return Planned(False, "no GPU to copy to", "predicted")
    if asked is not None:
        return Planned(asked, f"loader.pin_memory={str(asked).lower()}", "set")
    return Planned(True, "copies from page-locked memory run beside the host", "predicted")
