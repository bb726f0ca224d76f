"""Makes a user's DataLoader again with a few arguments changed. Everything else stays as it came."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from wellfed.config.schema import Backend, RunConfig
from wellfed.errors import ConfigError

_KNOBS = {
    "num_workers": "loader.num_workers",
    "prefetch_factor": "loader.prefetch_factor",
    "persistent_workers": "loader.persistent_workers",
    "pin_memory": "loader.pin_memory",
    "timeout": "loader.timeout_s",
    "batch_size": "workload.effective_batch_size",
    "drop_last": "workload.drop_last",
}
"""Arguments of a DataLoader that a knob changes."""
_OF_WORKERS: Mapping[str, Any] = {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
"""Arguments that need workers, with the values that torch demands without any."""


def typed_changes(config: RunConfig, split: str = "train") -> dict[str, Any]:
    """Returns the arguments of a split's DataLoader that were typed, or that the option of ``loader`` sets.

    Returns:
        Arguments of `torch.utils.data.DataLoader` by name. Empty with ``loader=auto`` and nothing typed, but for the
        number of samples of a step, which is the DataLoader's own then.
    """
    asked, workload = config.loader, config.workload
    loader_knobs = {name: knob.partition(".")[2] for name, knob in _KNOBS.items() if knob.startswith("loader.")}
    changes = {name: getattr(asked, knob) for name, knob in loader_knobs.items()}
    if asked.backend is Backend.inline:
        changes["num_workers"] = 0
    changes["batch_size"] = workload.effective_batch_size if split == "train" else workload.eval_batch_size
    changes["drop_last"] = (split == "train" and workload.drop_last) or None
    return {name: value for name, value in changes.items() if value is not None}


def remade(loader: Any, changes: Mapping[str, Any], split: str = "train") -> Any:
    """Returns the same DataLoader with only some arguments changed; ``loader`` itself if nothing differs.

    Dataset, sampler or batch sampler, ``collate_fn``, ``worker_init_fn``, generator and all else are the same objects.
    Without workers, the arguments that need them are left out. A batch size does not apply to batches that a dataset
    makes itself.

    Args:
        loader: anything that yields batches.
        changes: values by argument, as of `typed_changes`.
        split: train, val or test, for messages.

    Raises:
        ConfigError: the loader can't be made again so; the message names the knob and the way out.
    """
    wanted = {name: value for name, value in changes.items() if value != getattr(loader, name, None)}
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        wanted.pop("batch_size", None)
    if not wanted:
        return loader
    if why := _why_not(loader, wanted):
        name = next(iter(wanted))
        raise _refused(name, wanted[name], split, why)
    if loader.batch_size is None:
        _check_batch_sampler(loader, wanted, split)
        if not wanted:
            return loader
    values: dict[str, Any] = {**{name: getattr(loader, name) for name in _OF_WORKERS}, **wanted}
    if wanted.get("num_workers", loader.num_workers) == 0:
        values |= _OF_WORKERS
    elif values["prefetch_factor"] is None:
        values["prefetch_factor"] = 2  # torch's default
    if wanted.keys() & {"batch_size", "drop_last"}:
        size, drop_last = (wanted.get(name, getattr(loader, name)) for name in ("batch_size", "drop_last"))
        values["batch_sampler"] = BatchSampler(loader.sampler, size, drop_last)
    made = copy.copy(loader)
    # The constructor of a subclass may take other arguments. Torch reads all of them when an iterator is made.
    vars(made).update(values, _iterator=None)
    return made


def _why_not(loader: Any, wanted: Mapping[str, Any]) -> str:
    """Returns why a loader can't be made again; empty if it can."""
    cls = type(loader)
    if not isinstance(loader, DataLoader):
        return f"{cls.__name__} is no torch.utils.data.DataLoader, so it is used as it came"
    if (cls.__iter__, cls._get_iterator) != (DataLoader.__iter__, DataLoader._get_iterator):
        return f"{cls.__name__} has an __iter__ of its own, so it is used as it came"
    if "drop_last" in wanted and loader.batch_sampler is None:
        return f"the batches are made by {type(loader.dataset).__name__}"
    return ""


def _check_batch_sampler(loader: DataLoader[Any], wanted: dict[str, Any], split: str) -> None:
    """Takes out the changes that a batch sampler already has; raises a ConfigError for others."""
    sampler: Any = loader.batch_sampler
    for name in ("batch_size", "drop_last"):
        if name not in wanted:
            continue
        own = getattr(sampler, name, None)
        if own is not None and own != wanted[name]:
            why = f"its {type(sampler).__name__} decides the samples of a step ({name}={own})"
            raise _refused(name, wanted[name], split, why)
        if own is None and (split != "train" or name == "drop_last"):
            raise _refused(name, wanted[name], split, f"its {type(sampler).__name__} decides the samples of a step")
        del wanted[name]


def _refused(name: str, value: Any, split: str, why: str) -> ConfigError:
    knob = "workload.eval_batch_size" if name == "batch_size" and split != "train" else _KNOBS[name]
    left_out = "false" if name == "drop_last" else "null"
    way_out = f"Set {knob}={left_out}, or hand over the dataset instead of its loader: Datasets(dataset, ...)."
    problem = f"can't change the {split} DataLoader: {why}."
    return ConfigError.of(f"{knob}={str(value).lower()}", problem, way_out)
