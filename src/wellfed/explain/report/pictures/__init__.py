"""Pictures of a run, drawn from its tables."""
