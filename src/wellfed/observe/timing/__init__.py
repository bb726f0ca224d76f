"""Measures where the time of a training step goes: wait, copy, compute, host. Waits for no device, needs no torch.

The loop in `train/loop/` sets the marks. Start from `StepClock`, which collects one row a step, then
`readiness.summarise` for the figures of a run and `trace_figures.figures` for those of a profiler's trace.
"""
