"""Takes one run from its checked configuration to its record: assemble, plan, train, test, ceiling, report.

Knows every room but the commands and the processes of a sweep, and the order of things; how a run ends.
Start from ``train.train`` and ``stages``.
"""
