"""Runs the passes over the data of a run: training, validation, test and ceiling, each with a Trainer and callbacks.

Start from `passes.Passes`. `learner.Learner` is what a Trainer trains, in two forms: `model_learner` for a plain model,
`module_learner` for the user's LightningModule. `ceiling_pass` measures the rate without loading.
"""
