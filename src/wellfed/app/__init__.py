"""What the commands do: the top room, which may use every other and which none uses.

One file a command, each with ``main(argv) -> exit code``; ``cli`` is the table of those under ``python -m wellfed``.
Torch, Lightning, Hydra and wandb are imported inside functions, when a command needs them: never for ``--help``.

Start from ``cli.COMMANDS`` and ``doctor.examine``.
"""
