"""Runs a search: whole trainings, ranked by their metric.

Start at `searching`. `points` picks what is tried next of a grid, `asked_points` from Optuna.
"""
