"""Reads GPUs through NVML, the machine and the time of steps, and writes the figures to files and loggers.

Depends on no model, plan or run.
"""
