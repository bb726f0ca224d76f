"""Evaluates a plain ``nn.Module`` and schedules its learning rate, without Lightning.

`split_metrics` computes the metrics of a split, `scheduling` sets the rate.
"""
