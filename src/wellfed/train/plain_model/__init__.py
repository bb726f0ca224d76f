"""Evaluates a plain ``nn.Module`` and schedules its learning rate, without Lightning.

`split_metrics` computes the metrics of a split, `evaluating` passes it the batches, `scheduling` sets the rate.
"""
