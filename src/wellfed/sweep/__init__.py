"""Many short runs to find the fastest settings: the grid, its ledger, processes for trials, the leaderboard.

Plain data and processes; knows nothing of torch, Lightning or Hydra. What a trial is comes from `wellfed.trials.trial`.
Start at `wellfed.trials.sweep`, which puts the parts together; `ledger.py` is what a sweep leaves behind.
"""
