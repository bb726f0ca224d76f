"""Runs a search: whole trainings, ranked by their metric.

Start at `searching`. `proposals` picks what is tried next, of a grid or from Optuna.
"""
