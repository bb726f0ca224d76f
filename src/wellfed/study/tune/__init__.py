"""Runs ``python src/tune.py`` and writes what it has found as an experiment.

Start at `tuning`. `walk` decides what is tried, with the table in `moves`. `turns` measures it, `gain` compares start
and result, `written_experiment` writes the result.
"""
