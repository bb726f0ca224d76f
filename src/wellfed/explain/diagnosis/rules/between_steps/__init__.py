"""Rules on the time between steps: validation, checkpoints, logging, callbacks."""
