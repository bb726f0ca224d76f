"""Asks every rule for its finding about a run, and orders them by the time that they would win back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.rules import (
    busy_thread,
    clocks_limited,
    contended_loading,
    cpu_bound_loading,
    data_parallel,
    device_memory_full,
    few_threads,
    frequent_checkpoints,
    frequent_logging,
    frequent_validation,
    healthy,
    host_memory_full,
    launch_bound,
    loading_in_main_process,
    loss_blows_up,
    machine_was_slower,
    many_tensors,
    memory_bound,
    memory_creeps,
    memory_unused,
    restarted_workers,
    slow_callbacks,
    slow_copy,
    slow_handover,
    slow_samples,
    slow_start,
    slow_storage,
    small_batch,
    step_time_trend,
    synchronisation,
    tensor_cores_idle,
    too_few_steps,
    too_few_workers,
    uneven_batches,
    unexplained,
    utilisation_swings,
    wide_batches,
    workers_take_the_cpu,
)
from wellfed.diagnosis.swing import main_swing
from wellfed.diagnosis.swing_words import utilisation_said

Rule = Callable[[Evidence], Finding | None]
OF_EVENTS: tuple[Rule, ...] = (
    data_parallel.check,
    device_memory_full.check,
    memory_creeps.check,
    loss_blows_up.check,
    host_memory_full.check,
)
"""Decide from what happened and what ended the run, of however few steps."""
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
    step_time_trend.check,
    busy_thread.check,
    few_threads.check,
    many_tensors.check,
    wide_batches.check,
    utilisation_swings.check,
)
"""Decide from figures of enough steps."""


def conclude(evidence: Evidence) -> None:
    """Put swing and findings into the record of the evidence."""
    record = evidence.record
    record.swing = main_swing(evidence.swings_of_steps, evidence.swings_of_gpus, evidence.period_s)
    record.findings = [finding.entry() for finding in judge(evidence)]


def judge(evidence: Evidence) -> list[Finding]:
    """What is known of a run, the costliest first, notes last; where nothing costs time, the first says so."""
    too_few = too_few_steps.check(evidence)
    found = _asked(OF_EVENTS if too_few else (*OF_EVENTS, *OF_STEPS), evidence)
    found.sort(key=lambda finding: (finding.is_note, -finding.time_lost_frac))
    if too_few:
        return [*found, too_few]
    doubt = machine_was_slower.check(evidence)
    if any(not finding.is_note for finding in found):
        found[0] = _with_utilisation(found[0], evidence)
        return found if doubt is None else [*found, doubt]
    return [doubt or unexplained.check(evidence) or healthy.check(evidence), *found]


def _with_utilisation(finding: Finding, evidence: Evidence) -> Finding:
    """What a user sees of a cause on the GPU: that it is busy and idle in turns."""
    said = utilisation_said(evidence)
    if said is None or said in finding.message:
        return finding
    return replace(finding, message=f"{finding.message} {said}")


def _asked(rules: Iterable[Rule], evidence: Evidence) -> list[Finding]:
    return [finding for rule in rules if (finding := rule(evidence)) is not None]
