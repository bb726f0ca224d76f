"""Builds the objects of a run from its configuration, one builder per file.

Start from `assemble.complete`, which calls the builders in order: `datasets`, `models`, `optimizers` and
`user_callbacks`. `loaders` and `evaluation` build the readers of a split, after planning. `run_objects.RunObjects`
holds all objects of a run. `load_model` builds the model of a finished one.
"""
