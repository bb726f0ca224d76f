"""Takes one run from its checked configuration to its record: build, plan, train, test, ceiling, report.

Start from ``train.train``, then ``stages``, which has the order. ``objects/`` builds data, model and callbacks.
``planner`` plans, ``passes/`` trains and evaluates. ``bookkeeper`` writes record and files, ``closing`` the reports at
the end. ``outcome`` maps errors to exit codes.
"""
