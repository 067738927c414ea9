"""The `entrain` command."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from entrain_opt.cli.packages import refuse_compromised
from entrain_opt.errors import EntrainError

#: Commands that Lightning's own command line runs.
_LIGHTNING_COMMANDS = ("fit", "validate")


def build_parser() -> argparse.ArgumentParser:
    """All commands; `fit` and `validate` only for the list in `--help`."""
    from entrain_opt import __version__
    from entrain_opt.cli import doctor, export, index, plan, profile, rehearse, report, simulate

    parser = argparse.ArgumentParser(
        prog="entrain", description="Plan, balance and run multimodal LLM training from one recipe."
    )
    parser.add_argument("--version", action="version", version=f"entrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("fit", help="train a recipe (entrain fit --help lists every option)")
    commands.add_parser("validate", help="run a recipe's validation data through the model")
    for command in (plan, simulate, rehearse, report, index, profile, export, doctor):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors a user can cause are one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["doctor"]:
            from entrain_opt.cli import doctor

            return doctor.main(arguments[1:])
        if arguments and arguments[0] in _LIGHTNING_COMMANDS:
            refuse_compromised()
            from entrain_opt.cli.recipe import read_recipe

            for path in _recipes(arguments[1:]):
                read_recipe(path)  # Names a misspelled key of ours in a second, before anything heavy is imported.
            from entrain_opt.cli.fit import run_lightning

            return run_lightning(arguments)
        options = build_parser().parse_args(arguments)
        return int(options.run(options))
    except EntrainError as error:
        print(f"entrain: error: {_message(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("entrain: interrupted", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 1


def _message(error: EntrainError) -> str:
    """The message alone: loader processes wrap theirs in a traceback."""
    text = str(error)
    marker = f"{type(error).__name__}: "
    return text.rpartition(marker)[2].strip() if text.startswith("Caught ") and marker in text else text


def _recipes(arguments: Sequence[str]) -> list[str]:
    """Files given with `--config FILE`, `--config=FILE` or `-c FILE`."""
    found = []
    for position, argument in enumerate(arguments):
        if argument in ("--config", "-c") and position + 1 < len(arguments):
            found.append(arguments[position + 1])
        elif argument.startswith("--config="):
            found.append(argument.removeprefix("--config="))
    return found


if __name__ == "__main__":
    sys.exit(main())
