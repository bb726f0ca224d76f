"""The only door to Lightning: our training step inside its loop, and what we hang on its hooks.

Knows models, loaders, memory and the journal; knows nothing of Hydra, wandb or the command line.
Start from `trainer.fit` (one run) and `module.StepModule` (one optimizer step).
"""
