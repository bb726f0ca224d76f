"""Predicts the gain of a finding's overrides: other workers, fewer pauses, a fuller device."""
