"""Opens the only door to Lightning: its loop around our training step, and what we hang on its hooks.

Knows models, loaders, memory and the journal; knows nothing of Hydra, wandb or the command line.
Start from `trainer.fit` (one run) and `module.StepModule` (a plain model within it).
For a Trainer of your own: ``from wellfed import GPUCurves``.
"""
