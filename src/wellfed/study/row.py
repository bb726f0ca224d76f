"""One row type for all studies: what became of one trial, as a line of ``ledger.jsonl`` holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from wellfed.masking import hidden_in
from wellfed.record.entries import Status
from wellfed.record.files import plain

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
        """Returns the row of a parsed line. Raises KeyError or TypeError if it is no row of this version."""
        known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
        lists = {name: tuple(known[name]) for name in ("overrides", "stderr", "ci95") if known.get(name) is not None}
        return cls(**{**known, **lists})


OF_WHOLE_TRAININGS = ("trial", "outcome", "value", "value_step", "last_value", "validations", "trained_steps")
"""Fields that only the rows of whole trainings write."""
