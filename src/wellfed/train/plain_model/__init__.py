"""Trains and evaluates a plain ``nn.Module`` without Lightning: everything around one step.

Start from `plain_training.PlainTraining`. `split_metrics` computes the metrics of a split, `evaluating` passes it the
batches, `scheduling` sets the learning rate.
"""
