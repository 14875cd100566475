"""Entry point: one table of commands. A command is a function of its own name in a module of this room.

Modules are imported when one of their commands is asked for, and import what is heavy inside their functions, so that
``--help`` is quick.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click

from inrun import __version__
from inrun.errors import ConfigurationError, InrunError

#: Every command, with the module that has it.
COMMANDS = {
    "train": "train_commands",
    "demo": "train_commands",
    "replay": "replay_command",
    "scores": "ledger_commands",
    "groups": "ledger_commands",
    "info": "ledger_commands",
    "audit": "ledger_commands",
    "curate": "ledger_commands",
    "shares": "ledger_commands",
    "verify": "trust_commands",
    "repair": "trust_commands",
    "merge": "trust_commands",
    "report": "report_command",
    "bench": "bench_command",
    "fidelity": "fidelity_command",
}


class Commands(click.Group):
    """The commands of the table, each imported when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command, or None for a name that is not in the table."""
        if name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"inrun.cli.{COMMANDS[name]}"), name.replace("-", "_"))
        return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="inrun")
def cli() -> None:
    """Tell what every training sample was worth to the model you actually trained, while you train it."""


def main() -> None:
    """Run the command; exit with 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    try:
        code = cli.main(standalone_mode=False)
        if isinstance(code, int):  # click hands over what Exit was raised with
            sys.exit(code)
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ConfigurationError as error:
        click.echo(f"inrun: {error}", err=True)
        sys.exit(2)
    except InrunError as error:
        click.echo(f"inrun: {error}", err=True)
        sys.exit(1)
