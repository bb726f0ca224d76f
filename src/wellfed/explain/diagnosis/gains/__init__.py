"""Predicts what a finding's override would gain: other workers, fewer pauses, a fuller device.

Start from ``feeding.py``, which simulates the loader. ``finding.py`` defines the type `Gain`.
"""
