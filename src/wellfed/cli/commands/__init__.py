"""Holds the commands, a file each. ``main(argv) -> exit code`` reads arguments, calls another wing and prints.

Torch, Lightning and wandb are imported inside functions, so ``--help`` never loads them. Start from
`wellfed.cli.main.COMMANDS`, the table of all commands.
"""
