"""Proposes points: every combination (`grid`), what Optuna asks for (`optuna_study`), what findings suggest (`guided`).

Plain data; knows nothing of torch or Lightning, nor how a trial is run. Start at `grid`.
"""
