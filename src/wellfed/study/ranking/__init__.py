"""Ranks the points of a study: what ranks (`objective`), noise between runs, ties, and which knob mattered.

Plain data; knows nothing of torch, Lightning or Hydra. Start at `ranking`, which makes the `entry.Leaderboard`.
"""
