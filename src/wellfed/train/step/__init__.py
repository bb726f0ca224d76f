"""Makes one optimizer step, without Lightning: micro-batches and weights, forward, backward, clipping, retry.

Uses torch and the workload contract, and no Lightning, plan, configuration or loader. Start from
`train_step.TrainStep`, which training, `fit` and the probe before training run. Its forward and backward passes are in
`passes.Passes`, which the rehearsal of memory runs, too; `retry.StepRetry` does a step again with less memory.
"""
