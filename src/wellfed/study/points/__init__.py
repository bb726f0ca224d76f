"""Proposes points: every combination (`grid`), or what Optuna asks for (`optuna_study`).

Plain data; knows nothing of torch or Lightning, nor how a trial is run. Start at `grid`.
"""
