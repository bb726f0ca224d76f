"""Runs ``python src/tune.py`` and writes what it has found as options.

Start at `tuning`. `points.guided` decides what is tried, `turns` measures it, `written_options` writes the result.
"""
