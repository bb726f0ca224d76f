"""Finds the faults of a configuration, each with its way out.

`find_faults` searches the command line and the files after a failed composition. `target_faults` checks each
``_target_`` and its arguments, and imports a target only for arguments that no yaml lists.
"""
