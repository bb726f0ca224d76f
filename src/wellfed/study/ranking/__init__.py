"""Ranks the points of a study: ties, comparisons with the baseline, the winner.

Plain data; knows nothing of torch, Lightning or Hydra. Start at `ranking`, which makes the `board_entry.Leaderboard`.
"""
