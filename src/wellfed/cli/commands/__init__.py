"""Holds the commands, a file each, with ``main(argv) -> exit code``: it reads arguments, calls another wing, prints.

Torch, Lightning and wandb are imported inside functions, when a command needs them: never for ``--help``. Start from
`wellfed.cli.main.COMMANDS`, the table of all commands.
"""
