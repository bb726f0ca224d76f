"""Reports that no loss was found, but that it is unknown whether the run could be faster."""

from __future__ import annotations

from collections.abc import Mapping

from wellfed.explain.diagnosis.compute_phases import show_phases
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rules.feeding import slow_start
from wellfed.explain.diagnosis.thresholds import CEILING_FACTOR, LEAST_AT_CEILING_FRAC, WIDEST_HALF_FRAC
from wellfed.record import WallEntry
from wellfed.units import show_percent

WALL_NAMES = {
    "start_s": "start",
    "validation_s": "validations",
    "checkpoint_s": "checkpoints",
    "epoch_end_s": "ends of epochs",
    "logging_s": "logging",
    "end_s": "end",
    "other_s": "other",
}
"""Parts of the wall time beside steps and callbacks, by their keys in the record."""
_KNOWN_FRAC = 0.8
"""Share of the wall time in steps at the ceiling's rate and in a slow start, beyond which there is no note."""
_MOST_NAMED, _LEAST_NAMED_FRAC = 3, 0.01


def check(evidence: Evidence) -> Finding | None:
    """Returns a note why it is unknown whether the run is at its ceiling. For runs without other findings."""
    text, figures = _reason(evidence)
    return Finding("unknown", f"{text}.", {"wait_frac": evidence.wait_frac, **figures}, is_note=True) if text else None


def _reason(evidence: Evidence) -> tuple[str, dict[str, float]]:
    throughput, factor = evidence.record.throughput, evidence.ceiling_factor
    rate = throughput["samples_per_s"] if throughput else 0.0
    low, high = (throughput["ci95"] or (rate, rate)) if throughput else (0.0, 0.0)
    if throughput and (high - low) / 2 > WIDEST_HALF_FRAC * rate:
        text = (
            f"Unknown whether it could be faster: steps varied too much. {rate:,.0f} {throughput['sample_unit']}/s has "
            f"a 95 % interval from {max(0.0, low):,.0f} to {high:,.0f}. More steps (trainer.max_steps), and nothing "
            "else at work on the machine, make it narrower"
        )
        return text, {"ci95_low": low, "ci95_high": high}
    if factor is None:
        text = "Unknown whether it could be faster: no ceiling was measured. Nothing else that costs time was found"
        text += f"; {show_percent(evidence.wait_frac)} of a step waits for data"
        phases = show_phases(evidence.record.time)
        return (f"{text}, and the passes take: {phases}" if phases else text), {}
    figures = {"of_ceiling_frac": 1 / factor}
    if factor > CEILING_FACTOR:
        text = (
            f"Unknown how near it is to its ceiling: {show_percent(1 / factor)} of it, but the rate is known no better "
            f"than {show_percent(low / rate / factor)} to {show_percent(high / rate / factor)} of it"
        )
        return text, figures
    data_frac = evidence.wait_frac + evidence.copy_frac
    if data_frac > 1 - LEAST_AT_CEILING_FRAC:
        text = (
            f"Unknown whether it could be faster: {show_percent(data_frac)} of a step went into data, and yet the same "
            f"steps without data were only {factor:.2f} times as fast. Either may be off; more steps "
            "(trainer.max_steps) would show which"
        )
        return text, {**figures, "data_frac": data_frac}
    wall, frac = evidence.wall.entry, evidence.wall.at_ceiling_frac
    if wall is None or frac is None:
        text = f"Unknown whether it could be faster: its steps reached {show_percent(1 / factor)} of the ceiling"
        return f"{text}, and what passed between them was not measured", figures
    is_slow_start = slow_start.check(evidence) is not None  # reported by that rule
    is_known = is_slow_start and frac + evidence.wall.once_s / wall["total_s"] >= _KNOWN_FRAC
    if frac < LEAST_AT_CEILING_FRAC and not is_known:
        text = f"Unknown whether it could be faster: {show_percent(frac)} of the wall time of training went into steps"
        named = beside_steps(wall, {"callbacks": sum(wall["callbacks"].values())}, _MOST_NAMED)
        rest = ", ".join(named) or "slow first steps"
        return f"{text} at the ceiling's rate. The rest: {rest}", {**figures, "at_ceiling_frac": frac}
    return "", {}


def beside_steps(wall: WallEntry, hooks: Mapping[str, float], most: int) -> list[str]:
    """Returns the largest kinds of wall time beside steps with their shares, the largest first.

    Args:
        hooks: seconds of callbacks by name.
    """
    spent_s = {**{name: wall[key] for key, name in WALL_NAMES.items()}, **hooks}  # type: ignore[literal-required]
    shares = {name: one_s / wall["total_s"] for name, one_s in spent_s.items()}
    largest = sorted(shares, key=lambda name: -shares[name])[:most]
    return [f"{name} {show_percent(shares[name])}" for name in largest if shares[name] >= _LEAST_NAMED_FRAC]
