"""Holds the commands, a file each, with ``main(argv) -> exit code``: it reads arguments, calls a room below, prints.

``cli`` is the table of those under ``python -m wellfed``. Torch, Lightning, Hydra and wandb are imported inside
functions, when a command needs them: never for ``--help``.
Start from ``cli.COMMANDS`` and ``doctor.examine``.
"""
