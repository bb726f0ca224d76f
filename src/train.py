"""Trains, validates, tests: ``python src/train.py [overrides]``, or ``wellfed train``; ``--help`` shows the rest."""

import sys

try:
    from wellfed.cli.main import main
except ModuleNotFoundError as error:
    if error.name != "wellfed":
        raise
    print(
        f"The package wellfed is not installed for {sys.executable}. Activate the environment: "
        "source .venv/bin/activate. make train makes .venv where there is none, and trains.",
        file=sys.stderr,
    )
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
