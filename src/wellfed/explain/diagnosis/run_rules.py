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
from wellfed.explain.diagnosis.step_times import OTHER, phase_shares
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
    compute.small_batch, compute.synchronisation, compute.tensor_cores_idle, feeding.waiting_for_data,
    feeding.workers_take_the_cpu, feeding.slow_samples, feeding.slow_start, feeding.restarted_workers,
    pause.frequent_logging, pause.frequent_checkpoints, pause.frequent_validation, pause.slow_callbacks,
    pause.check_between_steps, compute.step_time_trend, verdicts.utilisation_swings, ranks.straggler,
)  # fmt: skip
"""Rules on figures, which need enough steps. Notes keep this order."""
_OF_COMPUTE = (
    compute.launch_bound, compute.memory_bound, compute.small_batch, compute.synchronisation,
    compute.tensor_cores_idle, memory.memory_unused,
)  # fmt: skip
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
    findings = run_rules(evidence)
    if is_script(record):
        findings = [in_script_words(finding, record) for finding in findings]
    record.findings = [finding.entry() for finding in findings]


def run_rules(evidence: Evidence) -> list[Finding]:
    """Returns the verdict, then the other findings, the costliest first, then notes.

    The verdict is the costliest of the events and of the causes of at least `WORTH_FRAC` of training; without either,
    the run is fed. Notes on how certain the figures are come before other notes. Beside other programs no gain is
    predicted.
    """
    findings = [finding for rule in OF_EVENTS if (finding := rule(evidence)) is not None]
    of_events = [finding.id for finding in findings if not finding.is_note]
    verdict = verdicts.too_few_steps(evidence) or verdicts.unknown(evidence)
    findings += [] if verdict else _of_steps(evidence)

    def is_verdict(finding: Finding) -> bool:
        return finding.id in of_events or finding.time_lost_frac >= WORTH_FRAC

    def rank(finding: Finding) -> tuple[bool, float]:
        weight = _RANKS_FIRST if finding.id == "straggler" else 1.0
        return not is_verdict(finding), -weight * finding.time_lost_frac

    findings.sort(key=rank)
    notes = [finding for finding in findings if finding.is_note]
    causes = [finding for finding in findings if not finding.is_note]
    doubts = [verdicts.busy_machine(evidence)]
    if verdict is not None:
        causes.append(verdict)
    else:
        if not any(map(is_verdict, causes)):
            verdict = _largest_gap(evidence) or verdicts.unexplained(evidence) or verdicts.fed(evidence)
            causes = [verdict, *(one for one in causes if one.id != verdict.id)]
        doubts.append(verdicts.steps_varied(evidence))
        if all(one.id != "workers_take_the_cpu" for one in causes):
            doubts.append(verdicts.machine_was_slower(evidence))
    if doubts[0] is not None:
        causes, notes = (list(map(_without_gain, one)) for one in (causes, notes))
    return [*causes, *(doubt for doubt in doubts if doubt is not None), *notes]


def _largest_gap(evidence: Evidence) -> Finding | None:
    """Returns the kind of pause that costs enough to be the verdict, though fewer of them win less than that."""
    wall, least_frac = evidence.wall.entry, WORTH_FRAC
    if wall is not None and wall["total_s"] > 0:  # start and end left out, as of all causes
        least_frac *= 1 - (wall["start_s"] + wall["end_s"]) / wall["total_s"]
    named = [rule(evidence, least_frac) for rule in (pause.frequent_checkpoints, pause.frequent_validation)]
    return max((one for one in named if one), key=lambda one: one.time_lost_frac, default=None)


def _without_gain(finding: Finding) -> Finding:
    return replace(finding, gain=None, lost_frac=finding.time_lost_frac) if finding.gain else finding


def _of_steps(evidence: Evidence) -> list[Finding]:
    """Returns the findings of `OF_STEPS`, with gains and losses of training as a whole, start and end left out."""
    findings = []
    for rule in OF_STEPS:
        finding, time, frac = rule(evidence), evidence.record.time, evidence.wall.steps_frac
        if finding is None:
            continue
        if rule in _OF_COMPUTE and time is not None:  # other compute, such as hooks, stays as it is
            phases = phase_shares(time)
            compute_frac = sum(phases.values()) - phases.get(OTHER, 0.0) if phases else time["compute_frac"]
            finding = _within(finding, min(1.0, compute_frac))
        if rule not in _OF_WALL and frac < MOSTLY_STEPS_FRAC:
            finding = replace(_within(finding, frac), is_of_training=True)
        findings.append(finding)
    return findings


def _within(finding: Finding, frac: float) -> Finding:
    """Returns the finding with gain and loss of the whole of which they affect the share ``frac``."""
    gain = None if finding.gain is None else finding.gain.within(frac)
    return replace(finding, gain=gain, lost_frac=None if finding.lost_frac is None else finding.lost_frac * frac)
