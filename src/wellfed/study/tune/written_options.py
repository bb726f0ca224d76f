"""Writes what a measured run had as options: whole groups of knobs as yaml, each with its reason.

An overlay of single knobs would survive a later ``loader=balanced`` on the command line, half of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from wellfed import project
from wellfed.config.compose import Composed, compose
from wellfed.config.files.option_file import Value, check_name, comment_lines, in_ascii, typed, write_files, yaml_lines
from wellfed.config.schema import LoaderConfig, MemoryConfig, RunConfig, TuneConfig, TuneWrite
from wellfed.errors import ConfigError
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.plan.run_plan import only_planned
from wellfed.record.entries import RunRecord
from wellfed.record.files import plain
from wellfed.study.points.grid import OF_THE_SWEEP, group_of
from wellfed.study.tune.gain import TuneGain
from wellfed.study.tune.trial import knob_of, with_overrides
from wellfed.study.tune.walk import Step

_SCHEMAS: Mapping[str, type] = {"loader": LoaderConfig, "memory": MemoryConfig}
OF_THE_DATA = ("loader.skip_ids", "loader.max_skipped")
"""Knobs about which samples come, and in which order: they are not written."""
_AS_CONFIGURED = "as configured"
"""Why a knob had its value where no plan decides it."""
_SHIPPED = {
    "loader": ("auto", "baseline", "conservative", "balanced", "aggressive", "own"),
    "memory": ("auto", "cache", "cache_host", "dynamic", "accumulate", "tight"),
}
MARK = "Written by python src/tune.py: the next tune of this name replaces it."
"""First line of tune's own files; other files are the user's."""
_GROUPS = ("loader", "memory")
"""Groups that are written. An option of gpu is a card with its budget, so knobs of gpu are typed instead."""
_VENDORS = ("nvidia", "geforce", "amd", "radeon")


def free_paths(
    name: str,
    groups: Sequence[str],
    config_dir: Path,
    *,
    flag: str,
    may_replace: Callable[[Path], bool],
    way_out: str = "Add --force, or take another name.",
) -> dict[str, Path]:
    """Returns group -> file of an option of that name.

    Args:
        flag: flag with which the name is typed.
        may_replace: returns whether an existing file may be replaced.
        way_out: advice where it may not.

    Raises:
        ConfigError: the name is unusable, or files are there already.
    """
    check_name(name, flag)
    paths = {group: config_dir / group / f"{name}.yaml" for group in groups}
    asked = typed(flag, name)
    if shipped := [group for group in groups if name in _SHIPPED[group]]:
        problem = f"is an option of {' and '.join(shipped)} that others rely on; it is not replaced."
        raise ConfigError.of(asked, problem, f"Write {typed(flag, f'my_{name}')}.")
    if there := [str(path) for path in paths.values() if path.exists() and not may_replace(path)]:
        raise ConfigError.of(asked, f"{' and '.join(there)}: there already.", way_out)
    return paths


def option_values(group: str, record: Mapping[str, Any]) -> dict[str, Value]:
    """Returns the knobs of an option as a run had them: by its plan where that decided them, else as configured."""
    plan, config = record.get("plan") or {}, (record.get("config") or {}).get(group) or {}
    left_out = only_planned({knob: planned["value"] for knob, planned in plan.items()})
    values = {}
    for knob in (each.name for each in fields(_SCHEMAS[group])):
        if f"{group}.{knob}" in OF_THE_DATA:
            continue
        if (planned := plan.get(f"{group}.{knob}")) is not None and f"{group}.{knob}" not in left_out:
            values[knob] = Value(planned["value"], f"{planned['source']}: {planned['because']}")
        elif knob in config:
            values[knob] = Value(config[knob], _AS_CONFIGURED)
    if group == "memory" and "memory.accumulate" not in left_out:
        values["accumulate"] = Value(None, "follows from micro_batch")
    return values


def option_text(group: str, record: Mapping[str, Any], heading: str, because: Mapping[str, str] | None = None) -> str:
    """Returns the whole file.

    Args:
        heading: first lines, which say where it comes from.
        because: better reasons than the record's for knobs that were set, dotted.
    """
    values = {
        knob: Value(
            value.value, (because or {}).get(f"{group}.{knob}", value.because) if _is_set(value) else value.because
        )
        for knob, value in option_values(group, record).items()
    }
    return "\n".join([*comment_lines(heading), *yaml_lines(values)]) + "\n"


def _is_set(value: Value) -> bool:
    """Returns whether the value was configured; nothing else is known of knobs that no plan decides."""
    return value.because.startswith(("set:", _AS_CONFIGURED))


def other_overrides(overrides: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Returns the overrides that have to be typed beside the options of ``groups``."""
    return [
        text
        for text in overrides
        if text.partition("=")[0].lstrip("+") in OF_THE_DATA or group_of(text) not in (*groups, *OF_THE_SWEEP)
    ]


def name_of(config: RunConfig, facts: MachineFacts, *, on_gpu: bool) -> str:
    """Returns a name for options of this workload on this machine: ``recsys_rtx_4090``, ``recsys_cpu_8``."""
    cores = f"cpu_{facts.cpu_quota_cores:g}"
    where = facts.training_gpus[0].name if on_gpu and facts.training_gpus else cores
    settings = [setting for setting in in_ascii(where).lower().split("_") if setting not in _VENDORS]
    devices = [f"{config.trainer.devices}x"] if config.trainer.devices > 1 else []
    name = "_".join(filter(None, [in_ascii(config.workload.name), *devices, *settings]))
    return name if name[0].isalpha() else f"tune_{name}"


@dataclass(frozen=True)
class WrittenOptions:
    """Result of writing the options."""

    files: tuple[Path, ...]
    why_not: str | None
    """Why there are no files."""
    use: tuple[str, ...]
    """Recommended overrides of `python src/train.py`: the result, or the start where no gain is proven."""
    unproven: tuple[str, ...] = ()
    """Overrides that run the result, where the start is recommended."""
    has_failed: bool = False
    """Whether the files should have been written, and could not be."""


@dataclass(frozen=True)
class TuneOptions:
    """Options of a name for a start.

    ``where`` has the folders of configurations, as `compose` takes them; ``flags`` are the same as typed.
    """

    name: str
    asked: TuneConfig
    start: Composed[RunConfig]
    where: Mapping[str, Any]
    flags: Sequence[str]

    @property
    def _config_dir(self) -> Path:
        return Path(self.where["config_dir"] or project.configs())

    def check(self) -> None:
        """Checks name and folder before anything is measured.

        Raises:
            ConfigError: the name is unusable, the start itself names it, the files are the user's, or their folder
                can't be written to.
        """
        check_name(self.name, "tune.name=")
        if self.asked.write is TuneWrite.never:
            return
        if self.name in (self.start.choices.get(group) for group in _GROUPS):
            problem = "is what the start itself names, and would be replaced."
            way_out = f"Add tune.name={self.name}_2, or tune.write=never."
            raise ConfigError.of(f"tune.name={self.name}", problem, way_out)
        others = "Take another tune.name, add --force, or tune.write=never to be shown what is found alone."
        paths = free_paths(
            self.name, _GROUPS, self._config_dir, flag="tune.name=", may_replace=self._may_replace, way_out=others
        )
        for path in paths.values():
            place = path.parent if path.parent.exists() else self._config_dir
            if not os.access(place, os.W_OK):
                way_out = "Make it writable, or add tune.write=never: what is found is then shown alone."
                raise ConfigError.of(f"tune.write={self.asked.write.name}", f"{place} can't be written to.", way_out)

    def _may_replace(self, path: Path) -> bool:
        try:
            is_own = path.read_text(encoding="utf-8").startswith(f"# {MARK}")
        except (OSError, ValueError):
            is_own = False
        return is_own or self.asked.replace

    def write(
        self, result: Step, steps: Sequence[Step], gain: TuneGain | None, record: RunRecord, heading: str
    ) -> WrittenOptions:
        """Writes the result, if that was asked for and the gain is proven.

        Args:
            steps: all steps of the tune.
            gain: gain over the start; None where it is the start.
            record: its run record; empty where it left none.
            heading: what was measured.
        """
        turned = result.change.overrides
        beside = other_overrides(self.start.overrides, ())
        plainly = WrittenOptions((), None, (*self.flags, *with_overrides(beside, turned)))
        if turned and not (gain is not None and gain.is_beyond_noise):
            plainly = replace(plainly, use=(*self.flags, *beside), unproven=plainly.use)
        if (why_not := self._why_not(result, gain)) is not None or not record.config:
            return replace(plainly, why_not=why_not or "its run.json can't be read")
        found: Mapping[str, Any] = plain(asdict(record))
        because = {
            knob_of(setting): f"turned by tune ({step.why}): {step.change.because}"
            for step in steps
            if step.is_kept or step is result
            for setting in step.change.turned
            if setting in turned
        }
        texts = {
            self._config_dir / group / f"{self.name}.yaml": option_text(group, found, f"{MARK}\n{heading}", because)
            for group in _GROUPS
        }
        try:
            write_files(texts, f"tune.name={self.name}", "", may_replace=self._may_replace)
        except ConfigError as error:
            return replace(plainly, why_not=str(error.faults[0]), has_failed=True)
        options = [f"{group}={self.name}" for group in _GROUPS]
        others = [setting for setting in turned if knob_of(setting).partition(".")[0] not in _GROUPS]
        settings = [*with_overrides(other_overrides(self.start.overrides, _GROUPS), others), *options]
        return WrittenOptions(tuple(texts), None, (*self.flags, *exact(settings, found, self.where)))

    def _why_not(self, result: Step, gain: TuneGain | None) -> str | None:
        write = self.asked.write
        if write is TuneWrite.never:
            return "tune.write=never"
        if write is TuneWrite.always:
            return None
        more = "; tune.write=always writes it all the same"
        if gain is None or not result.change.overrides:
            return f"nothing is better than the start{more}"
        return None if gain.is_beyond_noise else f"the gain is within noise{more}"


def exact(settings: Sequence[str], record: Mapping[str, Any], where: Mapping[str, Any]) -> list[str]:
    """Returns the overrides, and what an experiment among them would set differently from the options.

    Args:
        settings: overrides, with the options.
        record: run record that the options were made of.
        where: folders of configurations, as `compose` takes them.
    """
    wanted: dict[str, Any] = {
        f"{group}.{knob}": value.value for group in _GROUPS for knob, value in option_values(group, record).items()
    }
    configured = (record.get("config") or {}).get("loader") or {}
    of_data = {name: configured[knob] for name in OF_THE_DATA if (knob := name.partition(".")[2]) in configured}
    wanted |= {name: value for name, value in of_data.items() if name not in map(knob_of, settings)}
    try:
        found = compose(settings, "train", **where).resolved
    except ConfigError:  # the mixture breaks a rule
        return [*settings, *(_assigned(name, value) for name, value in wanted.items())]
    differing = {
        name: value
        for name, value in wanted.items()
        if plain(found[name.partition(".")[0]].get(name.partition(".")[2])) != value
    }
    return [*settings, *(_assigned(name, value) for name, value in differing.items())]


def _assigned(knob: str, value: Any) -> str:
    """Returns an override as Hydra reads it."""
    return f"{knob}={yaml.safe_dump([value], default_flow_style=True, width=10**6).strip()[1:-1]}".replace(" ", "")
