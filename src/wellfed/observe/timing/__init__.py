"""Measures where the time of a training step goes: wait, copy, compute, host. No synchronisation, no torch.

The training loop sets the marks. Start from `StepClock` (one row per step), `readiness.summarise` (figures of a run)
and `trace_figures.figures` (figures of a profiler's trace).
"""
