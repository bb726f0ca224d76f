"""Predicts the memory of a run's micro-batch (`footprints`), and measures it by real steps (`real_steps`)."""
