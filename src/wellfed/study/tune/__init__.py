"""Leads a search for faster settings by what each trial's diagnosis says, and tells what came of it.

Plain data; knows nothing of torch, Lightning or Hydra, nor how a trial is run: that is the room ``trials``.
Start at `search`, which is asked for the next change and told its trial.
"""
