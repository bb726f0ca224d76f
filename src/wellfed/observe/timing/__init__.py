"""Measures where the time of a training step goes: wait, copy, compute, host. No synchronisation, no torch.

Knows clocks and marks, not who sets them: the loop in ``lit/`` does. Start from `StepClock` (collects one row a
step), `readiness.summarise` (the figures of a run) and `trace_figures.figures` (those of a profiler's trace).
"""
