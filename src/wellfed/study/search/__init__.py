"""Ranks whole trainings by what they learned: the space of a search, its rows, its leaderboard with learning curves.

Plain data; knows nothing of torch, Lightning or Hydra, nor how a trial is run: that is the room ``trials``. `study` is
the door to Optuna. Start at `space`, what may vary, and `search_board`, what becomes of the trials.
"""
