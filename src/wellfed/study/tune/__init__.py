"""Runs ``python src/tune.py`` and writes what it has found as options.

Start at `tuning`. What is tried next is decided in `points.guided`.
"""
