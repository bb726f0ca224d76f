"""The micro-batch of a run: memory predicted, and measured by real steps."""
