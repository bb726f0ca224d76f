"""Runs a search: whole trainings, ranked by their metric.

Start at `search_study`. `proposals` picks what is tried next, of a grid or from Optuna.
"""
