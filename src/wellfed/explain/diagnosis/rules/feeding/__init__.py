"""Rules on the way of a batch: storage, workers, collation, copy."""
