"""Ranks many short runs: the grid of a sweep, its ledger, what ranks, the leaderboard and its files.

Plain data; knows nothing of torch, Lightning or Hydra, nor how a trial is run: that is the room ``trials``.
Start at `ledger`, which is what a sweep leaves behind, and `ranking`, which makes the leaderboard of it.
"""
