"""One row type for all studies: what became of one trial, as a line of ``ledger.jsonl`` holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from wellfed.masking import hidden_in
from wellfed.record import Status, plain

RowKind = Literal["trial", "confirm", "repeat"]
"""``confirm``: one of the best, measured again in turns. ``repeat``: measured again by tune to learn the noise."""
Outcome = Literal["complete", "pruned", "failed"]
"""complete: trained to its end, with a metric that ranks. pruned: ended early, since others were better by then."""


@dataclass(frozen=True)
class TrialMetric:
    """Metric of validation that ranks whole trainings."""

    name: str
    """Without ``val/``."""
    mode: Literal["max", "min"]

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        return self.mode == "max"


@dataclass(frozen=True)
class Row:
    """Result of one trial. Figures are None where they were not measured."""

    point: str
    kind: RowKind
    overrides: tuple[str, ...]
    """Overrides as typed, those that all points share first."""
    status: Status
    attempt: int
    """Counts the rows of this point and kind, from 1."""
    samples_per_s: float | None = None
    seconds: float = 0.0
    """Duration of the trial, from the start of its process to its end."""
    ci95: tuple[float, float] | None = None
    """95 % interval of samples_per_s, from the steps of this one trial."""
    steps: int = 0
    """Measured steps, without the warm-up."""
    warmup_steps: int = 0
    readiness_frac: float | None = None
    ceiling_samples_per_s: float | None = None
    peak_memory_gib: float | None = None
    """Memory reserved by the allocator on CUDA, else the growth of the process."""
    predicted_peak_gib: float | None = None
    util_pct: float | None = None
    """Mean utilisation of the trial's GPUs while it trained; None without NVML."""
    energy_per_sample_j: float | None = None
    """Energy of all its GPUs together; None where one of them was not read for nearly all of training."""
    device: str = ""
    """Description of the device that it trained on."""
    error: Mapping[str, Any] | None = None
    """``kind``, ``message``, ``advice`` as in run.json."""
    exit_code: int | None = None
    """A negative number is the signal that ended the process."""
    stderr: tuple[str, ...] = ()
    """The last lines, unless the status is ok."""
    folder: str = ""
    """Trial folder within the study's; empty where no trial was started."""
    started_at: str = ""
    """UTC."""
    code: str = ""
    """Version of the code, as in the study's file."""
    host: str = ""
    """Name of the machine that ran it."""
    machine: str = ""
    """Processor and cores of the host; empty where unknown."""
    trial: int | None = None
    """Number of a whole training, from 0; a sampler's trials are numbered by its study. None = a timed trial."""
    outcome: Outcome = "failed"
    """Result of a whole training. ``status`` is that of run.json: a pruned trial ends ``ok``."""
    value: float | None = None
    """The best value of the metric at a validation, that of ``checkpoints/best.ckpt``."""
    value_step: int | None = None
    """Optimizer steps until then; of values that agree in the six digits of ``metrics.csv``, the last."""
    last_value: float | None = None
    """The metric at the last validation."""
    validations: int = 0
    """Validations that gave the metric."""
    trained_steps: int = 0

    def to_line(self) -> str:
        """Returns one line of strict JSON, without its end."""
        found = asdict(self)
        if self.trial is None:
            found = {name: value for name, value in found.items() if name not in OF_WHOLE_TRAININGS}
        return json.dumps(hidden_in(plain(found)), allow_nan=False)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Row:
        """Returns the row of a parsed line; keys that a later version has added are left out.

        Raises:
            KeyError, TypeError, ValueError: it is no row.
        """
        known = {name: _checked(name, *hint, found[name]) for name, hint in _hints().items() if name in found}
        low_high = known.get("ci95")
        return cls(
            **{
                **known,
                "point": str(found["point"]),
                "overrides": tuple(map(str, found["overrides"])),
                "status": known["status"],
                "ci95": None if low_high is None else (float(low_high[0]), float(low_high[1])),
                "stderr": tuple(map(str, known.get("stderr") or ())),
            }
        )


OF_WHOLE_TRAININGS = ("trial", "outcome", "value", "value_step", "last_value", "validations", "trained_steps")
"""Fields that only the rows of whole trainings write."""


@cache
def _hints() -> dict[str, tuple[Any, tuple[Any, ...], bool]]:
    """Returns the type of each field, the types or values it is made of, and whether they are values."""
    return {name: (hint, get_args(hint), get_origin(hint) is Literal) for name, hint in get_type_hints(Row).items()}


def _checked(name: str, hint: Any, types: tuple[Any, ...], is_literal: bool, value: Any) -> Any:
    """Returns the value of a field if it has the field's type. Raises ValueError otherwise."""
    if value is None:
        if NoneType not in types:
            raise ValueError(f"{name} is null")
        return None
    if is_literal:
        is_sound = value in types
    elif hint is str:
        is_sound = isinstance(value, str)
    elif hint in (int, float) or types[:1] in ((int,), (float,)):
        is_sound = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_sound = is_sound and (int not in (hint, *types[:1]) or value == int(value))
    elif name == "error":
        is_sound = isinstance(value, Mapping)
        value = {key: str(text) for key, text in value.items() if text is not None} if is_sound else value
    else:  # a list of texts, or an interval
        is_sound = isinstance(value, list)
    if not is_sound:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    return value
