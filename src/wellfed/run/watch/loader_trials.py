"""Times a script's own DataLoader with other settings, after the script (``wellfed watch --predict``)."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from wellfed.errors import type_and_line
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.script_words import SPLIT
from wellfed.explain.report.text_table import TextTable
from wellfed.run.screen import Terminal
from wellfed.units import show_factor, show_ms

TRIAL_S = 3.0
"""Maximum seconds of one trial."""
_FEWEST, _MOST = 8, 200
"""Batches of a trial, after one for each worker."""
_MOST_WORKERS = 16
_LEAST_GAIN = 1.05
"""Minimum gain over the script's own setting, for a recommendation."""


@dataclass(frozen=True)
class LoaderTrial:
    """A setting, and the milliseconds between its batches if nothing else is done."""

    settings: Mapping[str, Any]
    batch_ms: float | None
    """None if it failed."""
    problem: str = ""

    def step_ms(self, fed_ms: float) -> float | None:
        """Returns the predicted milliseconds of a step that takes ``fed_ms`` without waiting."""
        if self.batch_ms is None:
            return None
        return max(fed_ms, self.batch_ms) if self.settings["num_workers"] else fed_ms + self.batch_ms

    @property
    def code(self) -> str:
        """The setting as an argument list."""
        return f"DataLoader({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


def show_trials(console: Terminal, loader: Any, evidence: Evidence) -> None:
    """Times the settings and prints a table, the best last."""
    fed_ms, step_ms = _fed_ms(evidence), evidence.steps.mean_ms
    if loader is None or fed_ms is None or step_ms is None:
        console.print(" --predict: no DataLoader fed enough steps of training to predict from.")
        return
    if loader._dataset_kind:
        console.print(f" Its dataset is iterable. More workers are not tried: {SPLIT}.")
    console.print(f" The DataLoader of the script, up to {TRIAL_S:g} s a setting; a fed step takes {show_ms(fed_ms)}:")
    table, trials = TextTable("setting", "a batch", "a step, predicted", "against this run"), list[LoaderTrial]()
    for settings in _candidates(loader, evidence):
        trial = timed(loader, settings)
        trials.append(trial)
        predicted_ms = trial.step_ms(fed_ms)
        if trial.batch_ms is None or predicted_ms is None:
            table.add_row(trial.code, trial.problem, "", "")
        else:
            factor = f"{show_factor(step_ms / predicted_ms)} times as fast"
            table.add_row(trial.code, show_ms(trial.batch_ms), show_ms(predicted_ms), factor)
    console.print(table)
    own_ms = trials[0].step_ms(fed_ms) or step_ms  # if the own setting failed: as in the script
    best = min(trials, key=lambda trial: trial.step_ms(fed_ms) or math.inf)
    best_ms = best.step_ms(fed_ms)
    if best_ms is None or own_ms < _LEAST_GAIN * best_ms:
        console.print(" No other setting would make its steps faster by 5 %.")
    else:
        console.print(f" Best: {best.code}, about {show_factor(own_ms / best_ms)} times as fast, predicted")


def timed(loader: Any, settings: Mapping[str, Any]) -> LoaderTrial:
    """Returns the time between batches of the same data with other settings."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of more workers than CPUs
            return LoaderTrial(settings, _batch_ms(_remade(loader, settings), int(settings["num_workers"])))
    except Exception as error:  # noqa: BLE001  data of the user, read once more
        return LoaderTrial(settings, None, type_and_line(error))


def _batch_ms(loader: Any, workers: int) -> float:
    batches = iter(loader)
    try:
        for _ in range(max(1, workers)):  # workers start, and files are read for the first time
            next(batches)
        number, began_s = 0, time.perf_counter()
        for _ in batches:
            number += 1
            passed_s = time.perf_counter() - began_s
            if number >= _MOST or (number >= _FEWEST and passed_s >= TRIAL_S) or passed_s >= 4 * TRIAL_S:
                break
        passed_s = time.perf_counter() - began_s
        if not number:
            raise ValueError("too few batches in its data to time it")
        return 1e3 * passed_s / number
    finally:
        del batches  # ends the workers


def _remade(loader: Any, settings: Mapping[str, Any]) -> Any:
    """Returns a DataLoader of the same data, with copies of its samplers' state."""
    options: dict[str, Any] = {
        name: getattr(loader, name) for name in ("collate_fn", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    if not settings["num_workers"]:
        options.update(timeout=0, multiprocessing_context=None)
    sampler = loader.batch_sampler
    if loader.batch_size is not None:
        options.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
        options["sampler"] = None if loader._dataset_kind else copy.copy(loader.sampler)
    elif sampler is not None:
        options["batch_sampler"] = copy.copy(sampler)
    else:
        options["batch_size"] = None
        options["sampler"] = None if loader._dataset_kind else copy.copy(loader.sampler)
    return DataLoader(loader.dataset, **options, **settings)


def _candidates(loader: Any, evidence: Evidence) -> Iterator[Mapping[str, Any]]:
    """Yields the script's own setting, then other numbers of workers and a longer queue, pinned on a GPU.

    For an IterableDataset only one worker is tried: several repeat all samples, unless it splits them.
    """
    own: dict[str, Any] = {"num_workers": loader.num_workers}
    if loader.num_workers:
        own.update(prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers)
    if loader.pin_memory:
        own["pin_memory"] = True
    yield own
    cores = max(1, int(evidence.cores or 1))
    pins = {"pin_memory": True} if evidence.on_gpu else {}
    numbers = {1} if loader._dataset_kind else {0, 1, 2, cores - 1, cores, 2 * cores}
    for workers in sorted(numbers - {loader.num_workers}):
        if 0 <= workers <= _MOST_WORKERS:
            yield {"num_workers": workers, **({"persistent_workers": True} if workers else {}), **pins}
    if loader.num_workers or (cores > 1 and not loader._dataset_kind):
        workers = loader.num_workers or cores
        yield {"num_workers": workers, "prefetch_factor": 8, "persistent_workers": True, **pins}


def _fed_ms(evidence: Evidence) -> float | None:
    """Returns the mean milliseconds of a step without waiting for data; None if too few steps were timed."""
    return None if evidence.steps.mean_ms is None else (1 - evidence.wait_frac) * evidence.steps.mean_ms
