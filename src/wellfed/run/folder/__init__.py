"""The folder of a run: created exclusively, locked, its checkpoints read, resumed from."""
