"""Builds the objects of a run from its configuration, one builder a file.

Start from `assemble.complete`, which calls the builders in order: `datasets`, `models`, `optimizers`, `user_callbacks`
and `feature_stages`. `loaders` and `evaluation` build what reads a split, once the plan is known. All objects of a run
are held by `run_objects.RunObjects`.
"""
