"""Writes the settings of a measured run as an option of the group experiment, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wellfed.config.compose import Composed, compose_as
from wellfed.config.files.experiment_file import free_path, write_experiment
from wellfed.config.files.option_file import Value, in_ascii
from wellfed.config.schema import RunConfig, TuneConfig, TuneWrite
from wellfed.errors import ConfigError
from wellfed.masking import SECRET_SHOWN, masked_override
from wellfed.observe.machine_facts import MachineFacts
from wellfed.plan.run_plan import left_to_loader
from wellfed.record.entries import RunRecord
from wellfed.study.points.grid import OF_THE_SWEEP, group_of
from wellfed.study.tune.trial import knob_of, with_overrides
from wellfed.study.tune.walk import Step
from wellfed.study.tune_gain import TuneGain

MARK = "Written by python src/tune.py: the next tune of this name replaces it."
"""First line of tune's own files; other files are the user's."""
_GROUPS = ("loader", "memory")
"""Groups whose planned values are written."""
_TYPED = ("seed", "paths")
"""Groups of a single run, which an experiment lacks: they are typed beside it."""
_VENDORS = ("nvidia", "geforce", "amd", "radeon")


def write_winner(
    name: str,
    overrides: Sequence[str],
    record: RunRecord,
    flags: Sequence[str],
    *,
    flag: str,
    heading: str,
    because: Mapping[str, str] = {},
    replaces: bool = False,
) -> tuple[Path, list[str]]:
    """Writes an experiment with what a run of these overrides had; returns its file and the arguments that use it.

    Args:
        record: record of the run, with the values that its plan decided.
        flags: arguments that set where configurations are searched.
        flag: flag with which the name was typed.
        heading: first lines of the file.
        because: better reasons than the record's for knobs that were set, dotted.
        replaces: whether a file of that name is replaced.

    Raises:
        ConfigError: the file can't be written.
    """
    own = [text for text in overrides if group_of(text) not in OF_THE_SWEEP]
    composed = compose_as(flags, own)
    planned = planned_values(record, because)
    path = write_experiment(*(name, composed, planned), flag=flag, heading=heading, replaces=replaces)
    beside = [text for text in own if group_of(text) in _TYPED or SECRET_SHOWN in masked_override(text)]
    return path, [*flags, *beside, f"experiment={name}"]


def planned_values(record: RunRecord, because: Mapping[str, str] = {}) -> dict[str, Value]:
    """Returns the values of loader and memory that the plan of a run decided, with reasons; also those of ``because``.

    The samples of a step are split by ``memory.micro_batch``; ``memory.accumulate`` follows from it.
    """
    plan = record.plan
    left_out = left_to_loader(
        {knob: planned["value"] for knob, planned in plan.items()}, record.config.get("loader", {})
    )
    values = {
        knob: Value(planned["value"], because.get(knob) or f"{planned['source']}: {planned['because']}")
        for knob, planned in plan.items()
        if (knob.partition(".")[0] in _GROUPS or knob in because) and knob not in left_out
    }
    if "memory.accumulate" in values and values.get("memory.micro_batch", Value(None, "")).value is not None:
        values["memory.accumulate"] = Value(None, "follows from micro_batch")
    return values


def name_of(config: RunConfig, facts: MachineFacts, *, on_gpu: bool) -> str:
    """Returns a name for the result of this workload on this machine: ``recsys_rtx_4090``, ``recsys_cpu_8``."""
    cores = f"cpu_{facts.cpu_quota_cores:g}"
    where = facts.training_gpus[0].name if on_gpu and facts.training_gpus else cores
    settings = [setting for setting in in_ascii(where).lower().split("_") if setting not in _VENDORS]
    devices = [f"{config.trainer.devices}x"] if config.trainer.devices > 1 else []
    name = "_".join(filter(None, [in_ascii(config.workload.name), *devices, *settings]))
    return name if name[0].isalpha() else f"tune_{name}"


@dataclass(frozen=True)
class Recommendation:
    """Result of a tune as a file, and what to type."""

    file: Path | None
    why_not: str | None
    """Why there is no file."""
    use: tuple[str, ...]
    """Recommended arguments of `python src/train.py`: the result, or the start where no gain is proven."""
    unproven: tuple[str, ...] = ()
    """Arguments that run the result, where the start is recommended."""
    has_failed: bool = False
    """Whether the file should have been written, and could not be."""


@dataclass(frozen=True)
class TuneExperiment:
    """The experiment that a tune writes."""

    name: str
    asked: TuneConfig
    start: Composed[RunConfig]
    flags: Sequence[str]
    """Arguments that set where configurations are searched."""

    def _replaces(self, path: Path) -> bool:
        """Returns whether the file may be replaced: it is tune's own, or ``--force`` was typed."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return self.asked.replace or MARK in text

    def check(self) -> Path:
        """Returns the file. Checks the name before anything is measured.

        Raises:
            ConfigError: the name is unusable, the start itself names it, or the file is the user's.
        """
        where = f"tune.name={self.name}"
        path = free_path(self.name, flag="tune.name=", replaces=True, flags=self.flags)
        if self.asked.write is TuneWrite.never:
            return path
        if self.name == self.start.choices.get("experiment"):
            problem = "is what the start itself names, and would be replaced."
            raise ConfigError.of(where, problem, f"Add tune.name={self.name}_2, or tune.write=never.")
        if path.exists() and not self._replaces(path):
            others = "Take another tune.name, add --force, or tune.write=never to be shown what is found alone."
            raise ConfigError.of(where, f"{path}: there already.", others)
        return path

    def write(
        self, result: Step, steps: Sequence[Step], gain: TuneGain | None, record: RunRecord, heading: str
    ) -> Recommendation:
        """Writes the result, if that was asked for and the gain is proven.

        Args:
            steps: all steps of the tune.
            gain: gain over the start; None where it is the start.
            record: its run record; empty where it left none.
            heading: what was measured.
        """
        turned = result.change.overrides
        start = [text for text in self.start.overrides if group_of(text) not in OF_THE_SWEEP]
        whole = with_overrides(start, turned)
        is_proven = gain is not None and gain.is_beyond_noise
        plainly = Recommendation(None, None, (*self.flags, *whole))
        if turned and not is_proven:
            plainly = replace(plainly, use=(*self.flags, *start), unproven=plainly.use)
        if self.asked.write is TuneWrite.never:
            return replace(plainly, why_not="tune.write=never")
        if self.asked.write is TuneWrite.auto and not (turned and is_proven):
            found = "the gain is within noise" if turned and gain is not None else "nothing is better than the start"
            return replace(plainly, why_not=f"{found}; tune.write=always writes it all the same")
        if not record.config:
            return replace(plainly, why_not="its run.json can't be read")
        because = {
            knob_of(setting): f"turned by tune ({step.why}): {step.change.because}"
            for step in steps
            if step.is_kept
            for setting in step.change.turned
            if setting in turned
        }
        try:
            path, use = write_winner(
                *(self.name, whole, record, self.flags),
                flag="tune.name=",
                heading=f"{MARK}\n{heading}",
                because=because,
                replaces=self._replaces(self.check()),  # the file may have been made while the tune ran
            )
        except ConfigError as error:
            return replace(plainly, why_not=str(error.faults[0]), has_failed=True)
        return Recommendation(path, None, tuple(use))
