"""Makes a user's DataLoader again with a few arguments changed. Everything else stays as it came."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from wellfed.config.schema import Backend, RunConfig
from wellfed.errors import ConfigError

LOADER_KNOBS: Mapping[str, tuple[str, Any]] = {
    "num_workers": ("num_workers", 0),
    "prefetch_factor": ("prefetch_factor", None),
    "persistent_workers": ("persistent_workers", False),
    "pin_memory": ("pin_memory", False),
    "timeout": ("timeout_s", 0),
}
"""Knob of ``loader`` for each argument of a DataLoader that it changes, and the value of loaders without workers."""
NEED_WORKERS = ("prefetch_factor", "persistent_workers", "timeout")
"""Arguments that torch refuses without workers."""


def typed_changes(config: RunConfig, split: str = "train") -> dict[str, Any]:
    """Returns the arguments of a split's DataLoader that were typed, or that the option of ``loader`` sets.

    Returns:
        Arguments of `torch.utils.data.DataLoader` by name. Empty with ``loader=auto`` and nothing typed, but for the
        number of samples of a step, which is the DataLoader's own then.
    """
    asked, workload = config.loader, config.workload
    changes = {name: getattr(asked, knob) for name, (knob, _) in LOADER_KNOBS.items()}
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
    plain = {name: default for name, (_, default) in LOADER_KNOBS.items()}
    wanted = {name: value for name, value in changes.items() if value != getattr(loader, name, plain.get(name))}
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        wanted.pop("batch_size", None)
    if not wanted or (split != "train" and why_fixed(loader)):
        return loader
    if why := why_fixed(loader):
        raise _refused(next(iter(wanted)), changes, split, why)
    for name in wanted.keys() & {"batch_size", "drop_last"} if loader.batch_size is None else ():
        sampler, value = loader.batch_sampler, wanted.pop(name)
        own = getattr(sampler, name, value if (name, split) == ("batch_size", "train") else None)
        if own != value:  # the samples of a training step are known before, from the lists of the batch sampler
            decides = f"its {type(sampler).__name__} decides the samples of a step"
            makes = f"{type(loader.dataset).__name__} makes the batches"
            raise _refused(name, changes, split, makes if sampler is None else f"{decides} ({name}={own})")
    if not wanted:
        return loader
    values: dict[str, Any] = {**{name: getattr(loader, name) for name in NEED_WORKERS}, **wanted}
    if wanted.get("num_workers", loader.num_workers) == 0:
        values |= {name: plain[name] for name in NEED_WORKERS}
    elif values["prefetch_factor"] is None:
        values["prefetch_factor"] = 2  # torch's default
    if wanted.keys() & {"batch_size", "drop_last"}:
        size, drop_last = (wanted.get(name, getattr(loader, name)) for name in ("batch_size", "drop_last"))
        values["batch_sampler"] = BatchSampler(loader.sampler, size, drop_last)
    made = copy.copy(loader)
    # The constructor of a subclass may take other arguments. Torch reads all of them when an iterator is made.
    vars(made).update(values, _iterator=None)
    for name in ("__pl_saved_args", "__pl_saved_kwargs", "__pl_saved_arg_names"):
        vars(made).pop(name, None)  # else Lightning would make it again for its ranks from the arguments before
    return made


def why_fixed(loader: Any) -> str:
    """Returns why no argument of a loader can be changed; empty if some can."""
    cls = type(loader)
    if not isinstance(loader, DataLoader):
        return f"{cls.__name__} is no torch.utils.data.DataLoader"
    if (cls.__iter__, cls._get_iterator) != (DataLoader.__iter__, DataLoader._get_iterator):
        return f"{cls.__name__} has an __iter__ of its own"
    return ""


def _refused(name: str, changes: Mapping[str, Any], split: str, why: str) -> ConfigError:
    knob = f"loader.{LOADER_KNOBS[name][0]}" if name in LOADER_KNOBS else f"workload.{name}"
    if name == "batch_size":
        knob = "workload.effective_batch_size" if split == "train" else "workload.eval_batch_size"
    left_out = "false" if name == "drop_last" else "null"
    way_out = f"Set {knob}={left_out}, or hand over the dataset instead of its loader: Datasets(dataset, ...)."
    problem = f"can't change the loader of {split}: {why}, so it is used as it came."
    return ConfigError.of(f"{knob}={str(changes[name]).lower()}", problem, way_out)
