"""Runs the passes over the data of a run: training, validation, test and ceiling, each with a Trainer and callbacks.

Start from `passes.Passes`. `learner.Learner` is what a Trainer trains, in two forms: `model_learner` for a plain model,
`module_learner` for the user's LightningModule. `eval_batches` reads the splits of evaluation, `ceiling_pass` measures
the rate without loading. `samples_of_nan` names the samples of steps with a non-finite loss.
"""
