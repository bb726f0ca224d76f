"""Observation: GPUs through NVML, the machine, time marks of steps, and the files and loggers that figures go to.

Knows nothing of models, plans or the order of a run.
"""
