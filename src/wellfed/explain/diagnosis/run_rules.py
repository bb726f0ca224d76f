"""Runs all rules on a run, and orders their findings by the time that they would win back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rules import compute_rules as compute
from wellfed.explain.diagnosis.rules import feeding_rules as feeding
from wellfed.explain.diagnosis.rules import memory_rules as memory
from wellfed.explain.diagnosis.rules import pause_rules as pause
from wellfed.explain.diagnosis.rules import rank_rules as ranks
from wellfed.explain.diagnosis.rules import verdict_rules as verdicts
from wellfed.explain.diagnosis.script_words import in_script_words, is_script
from wellfed.explain.diagnosis.step_times import OTHER, phase_shares, show_phases
from wellfed.explain.diagnosis.thresholds import MOSTLY_STEPS_FRAC, WORTH_FRAC

Rule = Callable[[Evidence], Finding | None]
OF_EVENTS: tuple[Rule, ...] = (
    compute.data_parallel, memory.device_memory_full, memory.memory_creeps, verdicts.loss_blows_up,
    memory.host_memory_full,
)  # fmt: skip
"""Rules on events and the end of a run, valid for any number of steps."""
EVENT_IDS = tuple(rule.__name__ for rule in OF_EVENTS)
"""Ids of their findings."""
DOUBTS = ("busy_machine", "machine_was_slower", "steps_varied")
"""Ids of notes on how certain verdict and gain are, which stand below the verdict."""
OF_STEPS: tuple[Rule, ...] = (
    compute.clocks_limited, compute.launch_bound, compute.memory_bound, memory.memory_unused, feeding.slow_copy,
    compute.small_batch, compute.synchronisation, compute.tensor_cores_idle, feeding.loading_in_main_process,
    feeding.too_few_workers, feeding.cpu_bound_loading, feeding.slow_storage, feeding.contended_loading,
    feeding.workers_take_the_cpu, feeding.uneven_batches, feeding.slow_samples, feeding.slow_handover,
    feeding.slow_start, feeding.restarted_workers, pause.frequent_logging, pause.frequent_checkpoints,
    pause.frequent_validation, pause.slow_callbacks, pause.check_between_steps,
    compute.step_time_trend,
    verdicts.utilisation_swings, ranks.straggler,
)  # fmt: skip
"""Rules on figures, which need enough steps. Notes keep this order."""
_OF_COMPUTE = (
    compute.launch_bound, compute.memory_bound, compute.small_batch, compute.synchronisation,
    compute.tensor_cores_idle,
)  # fmt: skip
"""Rules on the compute time of a step. Their findings show its phases."""
_GAINS_OF_COMPUTE = (*_OF_COMPUTE, memory.memory_unused)
"""Rules whose gains refer to the compute time of a step."""
_OF_WALL = (pause.frequent_checkpoints, pause.frequent_validation, pause.slow_callbacks, feeding.restarted_workers)
"""Rules whose gains refer to the wall time of training. Other gains refer to its steps."""
_RANKS_FIRST = 2.0
"""Factor on the time that a straggler costs, for the order of findings. Rank 0 gives all other figures, which are
misleading if another rank makes it wait."""


def conclude(evidence: Evidence) -> None:
    """Stores swing and findings in the record of the evidence."""
    record = evidence.record
    record.swing = evidence.swings.entry()
    found = run_rules(evidence)
    if is_script(record):
        found = [in_script_words(finding, record) for finding in found]
    record.findings = [finding.entry() for finding in found]


def run_rules(evidence: Evidence) -> list[Finding]:
    """Returns the verdict, then the other findings, the costliest first, then notes.

    The verdict is the costliest of the events and of the causes of at least `WORTH_FRAC` of training; without either,
    the run is fed. Notes on how certain the figures are come before other notes. Beside
    other programs no gain is predicted.
    """
    found = [finding for rule in OF_EVENTS if (finding := rule(evidence)) is not None]
    of_events = [finding.id for finding in found if not finding.is_note]
    verdict = verdicts.too_few_steps(evidence) or verdicts.unknown(evidence)
    found += [] if verdict else _of_steps(evidence)

    def is_verdict(finding: Finding) -> bool:
        return finding.id in of_events or finding.time_lost_frac >= WORTH_FRAC

    def rank(finding: Finding) -> tuple[bool, float]:
        weight = _RANKS_FIRST if finding.id == "straggler" else 1.0
        return not is_verdict(finding), -weight * finding.time_lost_frac

    found.sort(key=rank)
    notes = [finding for finding in found if finding.is_note]
    causes = [finding for finding in found if not finding.is_note]
    doubts = [verdicts.busy_machine(evidence)]
    if verdict is not None:
        causes.append(verdict)
    else:
        is_named = any(map(is_verdict, causes))
        if not is_named:
            verdict = _largest_gap(evidence) or verdicts.unexplained(evidence)
            is_named = verdict is not None
            verdict = verdict or _with_phases(verdicts.fed(evidence), evidence)
            causes = [verdict, *(one for one in causes if one.id != verdict.id)]
        doubts.append(verdicts.steps_varied(evidence))
        if all(one.id != "workers_take_the_cpu" for one in causes):
            doubts.append(verdicts.machine_was_slower(evidence))
        swing = evidence.swings.describe_utilisation()
        if is_named and swing is not None and swing not in causes[0].message:
            causes[0] = replace(causes[0], message=f"{causes[0].message} {swing}")
    if doubts[0] is not None:
        causes, notes = (list(map(_without_gain, findings)) for findings in (causes, notes))
    return [*causes, *(doubt for doubt in doubts if doubt is not None), *notes]


def _largest_gap(evidence: Evidence) -> Finding | None:
    """Returns the kind of pause that costs enough to be the verdict, though fewer of them win less than that."""
    named = [pause.frequent_checkpoints(evidence), pause.frequent_validation(evidence, WORTH_FRAC)]
    return max((one for one in named if one), key=lambda one: one.time_lost_frac, default=None)


def _within_step(finding: Finding, evidence: Evidence) -> Finding:
    """Returns the finding with a gain of the whole step. Its time outside of passes and optimizer stays as it is."""
    time, gain = evidence.record.time, finding.gain
    if time is None or gain is None:
        return finding
    phases = phase_shares(time)
    frac = sum(phases.values()) - phases.get(OTHER, 0.0) if phases else time["compute_frac"]
    return replace(finding, gain=gain.within(min(1.0, frac)))


def _with_phases(finding: Finding, evidence: Evidence) -> Finding:
    """Returns the finding with the share of each phase of compute, if they were measured."""
    shares = phase_shares(evidence.record.time)
    if not shares:
        return finding
    figures = {f"{name.replace(' ', '_')}_frac": share for name, share in shares.items()}
    message = f"{finding.message} Shares of a step: {show_phases(evidence.record.time)}."
    return replace(finding, message=message, evidence={**finding.evidence, **figures})


def _without_gain(finding: Finding) -> Finding:
    if finding.gain is None:
        return finding
    return replace(finding, gain=None, lost_frac=finding.time_lost_frac, steps_frac=None)


def _of_steps(evidence: Evidence) -> list[Finding]:
    """Returns the findings of `OF_STEPS`, with the share of the steps in training if that is small."""
    frac, found = evidence.wall.steps_frac, []
    for rule in OF_STEPS:
        finding = rule(evidence)
        if finding is None:
            continue
        finding = _within_step(finding, evidence) if rule in _GAINS_OF_COMPUTE else finding
        finding = _with_phases(finding, evidence) if rule in _OF_COMPUTE else finding
        is_part = frac < MOSTLY_STEPS_FRAC and rule not in _OF_WALL
        found.append(replace(finding, steps_frac=frac) if is_part else finding)
    return found
