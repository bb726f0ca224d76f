"""Trains plain models by a loop of its own, over Lightning's Fabric for devices and processes.

Start from `training.Training`, which makes steps, validations and checkpoints in a fixed order. `placed_model` holds
the model on its devices, and `place` is the door to Fabric. `checkpoints`, `figures`, `bar`, `trace` and
`sync_search` know nothing of the loop: a guest of Lightning's Trainer uses them too.
"""
