"""Completes command lines in a shell (``wellfed completion bash`` prints the script that enables it)."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from wellfed.command_line import command
from wellfed.config.hydra_internals import completions
from wellfed.config.hydra_session import open_hydra
from wellfed.config.knobs import entries
from wellfed.config.schema import EvaluateConfig, RunConfig, TuneRunConfig
from wellfed.errors import EXIT_OK

_BASH = """\
_wellfed_completion() {
    COMPREPLY=()
    local -a query
    case "$COMP_LINE" in
        *" -m wellfed "* | *src/train.py* | *src/tune.py* | *src/evaluate.py*) query=("${COMP_WORDS[0]}" -m wellfed) ;;
        wellfed\\ * | */wellfed\\ *) query=("${COMP_WORDS[0]}") ;;
        *) return ;;
    esac
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        "${query[@]}" completion --query 2> /dev/null))
}
complete -o default -o nospace -F _wellfed_completion python python3 wellfed
"""
_ZSH = """\
_wellfed_completion() {
    local -a found
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX" query=()
    case "$line" in
        *" -m wellfed "* | *src/train.py* | *src/tune.py* | *src/evaluate.py*) query=(${words[1]} -m wellfed) ;;
        wellfed\\ * | */wellfed\\ *) query=(${words[1]}) ;;
        *) _default; return ;;
    esac
    found=(${(f)"$(COMP_LINE="$line" COMP_WORDBREAKS= $query completion --query 2> /dev/null)"})
    if (( $#found )); then compadd -Q -U -S '' -- $found; else _default; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _wellfed_completion wellfed python python3
"""
_FISH = """\
function __wellfed_completion
    set -lx COMP_LINE (commandline -cp)
    set -lx COMP_WORDBREAKS
    set -l query (commandline -opc)[1]
    string match -qr '(^|/)python[0-9.]*$' -- $query; and set query $query -m wellfed
    $query completion --query 2> /dev/null | string trim --right
end
complete -c wellfed -f -a '(__wellfed_completion)'
complete -c python -a '(__wellfed_completion)'
complete -c python3 -a '(__wellfed_completion)'
"""
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_DESCRIPTION = """\
Prints what turns on tab completion in a shell: eval "$(wellfed completion bash)" or zsh; in fish
wellfed completion fish | source. It completes commands, their flags, and the options, knobs and values of train, tune,
evaluate, sweep, search, plan, fit and bench; also after python src/train.py and python -m wellfed."""
_WITH_OVERRIDES = ("plan", "fit", "bench")
"""Commands that take overrides of `train`, and flags of their own."""
_SHORT_FOR_TRAIN = ("sweep", "search")
"""Commands that are short for `train` with a flag."""
_SCHEMAS = {"train": RunConfig, "tune": TuneRunConfig, "evaluate": EvaluateConfig}
"""Entry script -> schema of its configuration."""
_SECOND_WORDS = {"cache": ("clear", "list"), "completion": tuple(_SHELLS), "add": ("workload",)}


def main(argv: Sequence[str]) -> int:
    """Prints the shell's completion function or, when that function calls, the completions of a command line."""
    parser = argparse.ArgumentParser(prog=command("completion"), description=_DESCRIPTION)
    parser.add_argument("shell", nargs="?", choices=_SHELLS, default="bash", help="default: bash")
    parser.add_argument("--query", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if not asked.query:
        print(_SHELLS[asked.shell], end="")
        return EXIT_OK
    line = os.environ.get("COMP_LINE", "")
    line = line[: int(os.environ.get("COMP_POINT") or len(line))]
    found = candidates(line)
    # The shell splits words at these signs and replaces only the last piece.
    breaks = [sign for sign in "=:" if sign in os.environ.get("COMP_WORDBREAKS", "")]
    cut = max((_words(line)[-1].rfind(sign) for sign in breaks), default=-1) + 1
    print("\n".join(text[cut:] for text in found))
    return EXIT_OK


def candidates(line: str) -> list[str]:
    """Returns completions of the last word of a command line; complete words end in a blank."""
    words = _words(line)
    for number, word in enumerate(words[:-1]):
        if script := re.search(r"(?:^|/)src/(train|tune|evaluate)\.py$", word):
            return _overrides(script.group(1), words[number + 1 :])
        is_command = PurePath(word).stem == "wellfed" and number == 0
        if is_command or (word == "wellfed" and words[number - 1] == "-m"):
            return list(_commands(words[number + 1 :]))
    return []


def _words(line: str) -> list[str]:
    return line.split() + ([""] if not line or line[-1].isspace() else [])


def _commands(words: Sequence[str]) -> Iterator[str]:
    from wellfed.cli import main as cli  # circular: main imports this file

    name, *rest = words
    if not rest:
        yield from (f"{command.name} " for command in cli.COMMANDS if command.name.startswith(name))
    elif name in (*_SCHEMAS, *_SHORT_FOR_TRAIN):
        yield from _overrides("train" if name in _SHORT_FOR_TRAIN else name, rest)
    elif rest[-1].startswith("-"):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
        flags = sorted(set(re.findall(r"(?<!\S)--[\w-]+", shown.getvalue())))
        yield from (f"{flag} " for flag in flags if flag.startswith(rest[-1]))
    elif name in _SECOND_WORDS and len(rest) == 1:
        yield from (f"{word} " for word in _SECOND_WORDS[name] if word.startswith(rest[0]))
    elif name in _WITH_OVERRIDES:
        yield from _overrides("train", [word for word in rest if not word.startswith("-")])


def _overrides(config_name: str, words: Sequence[str]) -> list[str]:
    found = completions(open_hydra(job_name=config_name), config_name, words)
    word = words[-1]
    name, equals, _ = word.partition("=")
    knob = entries(_SCHEMAS[config_name]).get(name.lstrip("+~"))
    if equals and knob is not None and not knob.is_group:
        values = [one.name for one in knob.type] if knob.is_enum else ["true", "false"] if knob.type is bool else []
        values += ["null"] if knob.is_optional else []
        found = sorted({*found, *(f"{name}={value}" for value in values)})
    matching = [text for text in found if text.startswith(word)]
    return [text if text.endswith(("=", ".", "/")) else f"{text} " for text in matching]
