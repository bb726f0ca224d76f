"""Reads the command line of a multirun: axes, overrides that all points share, and each point's configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Sweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from wellfed.config.compose import Composed, composed_from, flags_of, folder_of
from wellfed.config.faults.check_composed import examine
from wellfed.config.faults.explain_refusal import explain
from wellfed.config.faults.find_faults import find_faults
from wellfed.config.faults.override_faults import MOST_VALUES, choice_fault, first_values, is_choice, read_overrides
from wellfed.config.hydra_internals import IConfigRepository, searched_files
from wellfed.config.hydra_session import COMPOSE_ERRORS, job_of
from wellfed.config.knobs import entries, is_free
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError, Fault
from wellfed.masking import masked


@dataclass(frozen=True)
class Varied:
    """One axis of a command line, free of Hydra's types."""

    typed: str
    """The override as typed: knob or group, and its values."""
    values: tuple[str, ...] = ()
    """Distinct values as typed, in order; empty for an interval."""
    interval: tuple[float, float] | None = None
    """Start and end."""
    is_whole: bool = False
    """Whether only whole numbers of the interval are allowed: ``int(interval(..))``."""
    is_range: bool = False
    """Whether ``values`` come from a range."""
    tags: frozenset[str] = frozenset()
    """Tags of the value, as in ``tag(log, ..)``."""


class Multirun:
    """A multirun that Hydra has opened.

    Args:
        loader: that Hydra's config loader.
        master: configuration of all overrides that have one value.
        params: axes of the chosen option (``hydra.sweeper.params``).
        arguments: as typed; a knob typed here replaces an axis of the option.
        group_of: returns the group that a knob belongs to.
        no_axes: groups that must be the same in all points.
    """

    def __init__(
        self,
        loader: ConfigLoader,
        master: DictConfig,
        *,
        params: Mapping[str, Any],
        arguments: Sequence[str],
        group_of: Callable[[str], str],
        no_axes: Collection[str],
    ) -> None:
        self._loader, self._master = loader, master
        self._numbers: dict[tuple[str, ...], int] = {}
        """Overrides of a point -> its ``hydra.job.num``."""
        _number(master, 0)  # so that what all points share can be resolved
        self._is_fixed: Callable[[str], bool] = lambda name: group_of(name) in no_axes
        typed = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        self._typed = read_overrides(typed, multirun=True, loader=loader)

    @property
    def typed_dir(self) -> Path | None:
        """``hydra.sweep.dir`` if it was typed."""
        hydra = self._master.hydra
        is_typed = any(text.lstrip("+").startswith("hydra.sweep.dir=") for text in hydra.overrides.hydra)
        return Path(folder_of(hydra.sweep, "hydra.sweep")) if is_typed else None

    @property
    def choices(self) -> dict[str, str]:
        """Group -> option shared by all points, Hydra's own groups included."""
        return {str(group): str(option) for group, option in self._master.hydra.runtime.choices.items() if option}

    @property
    def flags(self) -> tuple[str, ...]:
        """Arguments that read the same files again: see `Composed.flags`."""
        return tuple(flags_of(self._master.hydra))

    def base(self) -> Composed[RunConfig]:
        """Returns the configuration that all points share; points may differ in any knob outside ``no_axes``. Faults
        in knobs that no point can change are raised."""
        with job_of(self._master) as job:
            config, found = examine(job)
            if faults := [fault for fault in found if config is None or self._is_fixed(fault.where)]:
                raise ConfigError(faults)
            return composed_from(job, self._master.hydra, run_dir=None, checked=False)

    def varied(self, *, may_be_interval: bool = False) -> tuple[dict[str, Varied], tuple[str, ...]]:
        """Returns the axes, and the overrides that all points share, as typed. Raises all their faults."""
        last = {typed.parsed.get_key_element(): typed for typed in self._typed if typed.parsed is not None}
        faults = [typed.fault for typed in self._typed if typed.fault]
        axes: dict[str, Override] = {}
        fixed = []
        for key, typed in last.items():
            parsed: Any = typed.parsed
            if not parsed.is_sweep_override():
                fixed.append(f"{key}={parsed.get_value_element_as_str()}")
            elif not typed.fault:
                axes[key] = parsed
        faults += filter(None, (self._fault_of_axis(parsed, may_be_interval) for parsed in axes.values()))
        if faults:
            raise ConfigError(faults)
        return {key: _varied(parsed) for key, parsed in axes.items()}, tuple(fixed)

    def _fault_of_axis(self, parsed: Override, may_be_interval: bool) -> Fault | None:
        text, name = parsed.input_line or "", parsed.key_or_group
        if self._is_fixed(name):
            way_out = (
                f"Write {name}=[{text.partition('=')[2]}] for a list, or one value." if "." in name else "Name one."
            )
            return Fault(text, "is no axis: it says how the sweep itself is run or watched.", way_out)
        if parsed.is_interval_sweep() and not may_be_interval:
            listed = f"Name them: {name}=1,2,4 or {name}=range(1,9,2); search=optuna takes an interval."
            return Fault(text, "has no end of values.", listed)
        number = len(first_values(parsed, MOST_VALUES)) if parsed.is_discrete_sweep() else 1
        if number in (0, MOST_VALUES):
            many = "no value" if number == 0 else f"{number:,} values or more"
            return Fault(text, f"is an axis with {many}.", f"Name a few: {name}=a,b")
        repo = self._repository()
        if is_choice(parsed, repo):
            is_interval = Fault(text, f"{name} has options, and these are no numbers.", f"Name them: {name}=a,b")
            return is_interval if parsed.is_interval_sweep() else choice_fault(parsed, repo)
        if name not in entries(RunConfig) and not is_free(name):
            return Fault(text, f"there is no knob {name}.", explain(RunConfig, name)[1])
        return None

    @property
    def _searched(self) -> list[str]:
        return [text for text in self._master.hydra.overrides.hydra if text.startswith("hydra.searchpath=")]

    def _repository(self) -> IConfigRepository:
        """Returns the repository of all searched files, hydra.searchpath included."""
        parsed = [one.parsed for one in read_overrides(self._searched, multirun=False) if one.parsed is not None]
        return searched_files(self._loader, self._master.hydra.job.config_name, parsed)

    def unresolved(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Returns the values of overrides that need not be a point's: interpolations as written, secrets as ``***``.

        Raises:
            one of `COMPOSE_ERRORS`: a value needs what an axis brings.
        """
        name = self._master.hydra.job.config_name
        cfg = self._loader.load_configuration(name, [*self._searched, *overrides], RunMode.MULTIRUN)  # may lack a group
        values: Any = OmegaConf.to_container(cfg, enum_to_str=True)
        del values["hydra"]
        return dict(masked(values))

    def compose(self, overrides: Sequence[str], folder: Path) -> Composed[RunConfig]:
        """Returns the configuration of one point, which writes to ``folder``. Raises all its faults."""
        try:
            cfg = self._loader.load_sweep_config(self._master, list(overrides))
        except COMPOSE_ERRORS as error:
            name = self._master.hydra.job.config_name
            raise ConfigError(find_faults(self._loader, name, [*self._searched, *overrides], error)) from error
        _number(cfg, self._numbers.setdefault(tuple(overrides), len(self._numbers)))
        with job_of(cfg) as job:
            return composed_from(job, cfg.hydra, run_dir=str(folder))


def _number(cfg: DictConfig, number: int) -> None:
    with open_dict(cfg.hydra.job):
        cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)


def _varied(parsed: Override) -> Varied:
    typed, swept = parsed.input_line or "", parsed.value()
    tags = frozenset(map(str, swept.tags)) if isinstance(swept, Sweep) else frozenset[str]()
    if isinstance(swept, IntervalSweep):
        ends: Any = (swept.start, swept.end)
        is_whole = all(isinstance(end, int) for end in ends)
        return Varied(typed, interval=(float(ends[0]), float(ends[1])), is_whole=is_whole, tags=tags)
    values = tuple(dict.fromkeys(parsed.sweep_string_iterator()))
    return Varied(typed, values, is_range=isinstance(swept, RangeSweep) and not swept.shuffle, tags=tags)
