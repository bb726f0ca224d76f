"""Runs all rules on a run, and orders their findings by the time that they would win back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wellfed.explain.diagnosis.compute_phases import OTHER, phase_shares, show_phases
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rules.between_steps import (
    frequent_checkpoints,
    frequent_logging,
    frequent_validation,
    slow_callbacks,
)
from wellfed.explain.diagnosis.rules.compute import (
    busy_thread,
    clocks_limited,
    data_parallel,
    few_threads,
    launch_bound,
    many_tensors,
    memory_bound,
    small_batch,
    step_time_trend,
    synchronisation,
    tensor_cores_idle,
    wide_batches,
)
from wellfed.explain.diagnosis.rules.feeding import (
    contended_loading,
    cpu_bound_loading,
    loading_in_main_process,
    restarted_workers,
    slow_copy,
    slow_handover,
    slow_samples,
    slow_start,
    slow_storage,
    too_few_workers,
    uneven_batches,
    workers_take_the_cpu,
)
from wellfed.explain.diagnosis.rules.memory import device_memory_full, host_memory_full, memory_creeps, memory_unused
from wellfed.explain.diagnosis.rules.ranks import (
    compute_straggler,
    copy_straggler,
    host_straggler,
    input_straggler,
    slow_gpu,
    slow_link,
    slow_machine,
    uneven_memory,
    uneven_shares,
)
from wellfed.explain.diagnosis.rules.verdict import (
    busy_machine,
    healthy,
    loss_blows_up,
    machine_was_slower,
    too_few_steps,
    unexplained,
    unknown,
    utilisation_swings,
)
from wellfed.explain.diagnosis.script_words import in_script_words, is_script
from wellfed.explain.diagnosis.thresholds import LEAST_AT_CEILING_FRAC

Rule = Callable[[Evidence], Finding | None]
OF_EVENTS: tuple[Rule, ...] = (
    data_parallel.check,
    device_memory_full.check,
    memory_creeps.check,
    loss_blows_up.check,
    host_memory_full.check,
)
"""Rules on events and the end of a run, valid for any number of steps."""
OF_RANKS: tuple[Rule, ...] = (
    input_straggler.check,
    copy_straggler.check,
    host_straggler.check,
    compute_straggler.check,
    uneven_shares.check,
    slow_gpu.check,
    slow_machine.check,
    slow_link.check,
    uneven_memory.check,
)
"""Rules that compare the ranks of a run. Rank 0 gives all other figures, which are misleading if another rank makes it
wait. So these findings come first, unless another one wins back twice as much."""
OF_STEPS: tuple[Rule, ...] = (
    clocks_limited.check,
    launch_bound.check,
    memory_bound.check,
    memory_unused.check,
    slow_copy.check,
    small_batch.check,
    synchronisation.check,
    tensor_cores_idle.check,
    loading_in_main_process.check,
    too_few_workers.check,
    cpu_bound_loading.check,
    slow_storage.check,
    contended_loading.check,
    workers_take_the_cpu.check,
    uneven_batches.check,
    slow_samples.check,
    slow_handover.check,
    slow_start.check,
    restarted_workers.check,
    frequent_logging.check,
    frequent_checkpoints.check,
    frequent_validation.check,
    slow_callbacks.check,
    slow_callbacks.check_between_steps,
    slow_callbacks.check_between_passes,
    step_time_trend.check,
    busy_thread.check,
    few_threads.check,
    many_tensors.check,
    wide_batches.check,
    utilisation_swings.check,
    *OF_RANKS,
)
"""Rules on figures, which need enough steps."""
OF_GAPS = (frequent_checkpoints.check, frequent_validation.check, slow_callbacks.check)
"""Rules on time between the steps. They take the least share to report."""
_OF_COMPUTE = (
    launch_bound.check,
    memory_bound.check,
    small_batch.check,
    synchronisation.check,
    tensor_cores_idle.check,
    few_threads.check,
    many_tensors.check,
)
"""Rules on the compute time of a step. Their findings show its phases."""
_GAINS_OF_COMPUTE = (*_OF_COMPUTE, memory_unused.check)
"""Rules whose gains refer to the compute time of a step."""
_OF_WALL = (*OF_GAPS, restarted_workers.check)
"""Rules whose gains refer to the wall time of training. Other gains refer to its steps."""
_RANKS_FIRST = 2.0
"""Factor on the time that a finding about ranks wins back, for the order of findings."""
_EXPLAINED_FRAC = 0.5
"""Minimum share of a gap in the missing time, for a finding."""


def conclude(evidence: Evidence) -> None:
    """Stores swing and findings in the record of the evidence."""
    record = evidence.record
    record.swing = evidence.swings.entry()
    found = run_rules(evidence)
    if is_script(record):
        found = [in_script_words(finding, record) for finding in found]
    record.findings = [finding.entry() for finding in found]


def run_rules(evidence: Evidence) -> list[Finding]:
    """Returns the findings of a run, the costliest first, notes last. If no time is lost, the first finding says so. If
    other programs use the machine, that finding is first, and no gain is predicted."""
    too_few = too_few_steps.check(evidence)
    found = [finding for rule in OF_EVENTS if (finding := rule(evidence)) is not None]
    found += [] if too_few else _of_steps(evidence)
    found.sort(key=lambda finding: (finding.is_note, -_weight(finding) * finding.time_lost_frac))
    found += [too_few] if too_few else []
    if (busy := busy_machine.check(evidence)) is not None:
        return [busy, *(_without_gain(finding) for finding in found)]
    if too_few:
        return found
    doubt = machine_was_slower.check(evidence)
    if any(not finding.is_note for finding in found):
        text = evidence.swings.describe_utilisation()
        if text is not None and text not in found[0].message:
            found[0] = replace(found[0], message=f"{found[0].message} {text}")
        is_known = any(finding.id == "workers_take_the_cpu" for finding in found)
        return found if doubt is None or is_known else [*found, doubt]
    verdict = doubt or unexplained.check(evidence) or _largest_gap(evidence)
    verdict = verdict or unknown.check(evidence)
    if verdict is None and (fed := healthy.check(evidence)) is not None:
        verdict = _with_phases(fed, evidence)
    return found if verdict is None else [verdict, *found]


def _weight(finding: Finding) -> float:
    """Returns a factor on the time of a finding, for its order."""
    return _RANKS_FIRST if "rank" in finding.evidence or finding.id == "slow_link" else 1.0


def _largest_gap(evidence: Evidence) -> Finding | None:
    """Returns the largest gap if too little of the wall time was spent in steps at the ceiling's rate."""
    frac = evidence.wall.at_ceiling_frac
    if frac is None or frac >= LEAST_AT_CEILING_FRAC:
        return None
    named = [check(evidence, _EXPLAINED_FRAC * (1 - frac)) for check in OF_GAPS]
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
    message = finding.message.removesuffix(finding.prospect)
    message += " What that would win can't be predicted beside other programs."
    return replace(finding, message=message, gain=None, lost_frac=finding.time_lost_frac, steps_frac=None)


def _of_steps(evidence: Evidence) -> list[Finding]:
    """Returns the findings of `OF_STEPS`, with the share of the steps in the wall time if that is small."""
    frac = evidence.wall.steps_frac
    is_small = frac is not None and frac < LEAST_AT_CEILING_FRAC
    found = []
    for rule in OF_STEPS:
        finding = rule(evidence)
        if finding is None:
            continue
        finding = _within_step(finding, evidence) if rule in _GAINS_OF_COMPUTE else finding
        finding = _with_phases(finding, evidence) if rule in _OF_COMPUTE else finding
        found.append(replace(finding, steps_frac=frac) if is_small and rule not in _OF_WALL else finding)
    return found
