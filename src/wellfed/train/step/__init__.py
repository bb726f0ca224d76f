"""Makes one optimizer step, without Lightning: micro-batches and weights, forward, backward, clipping, retry.

Uses torch and the workload contract, but no Lightning, plan, configuration or loader. Start from
`train_step.TrainStep`, which training, `fit` and the steps before training run. `step_passes.Computation` makes its
forward and backward passes, for the prediction of memory too.
"""
