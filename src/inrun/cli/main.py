"""Entry point: one table of commands. A command is a function of its own name in a module of this room.

Modules are imported when one of their commands is asked for, and import what is heavy inside their functions, so that
``--help`` is quick.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import sys
from importlib import import_module
from typing import NoReturn

import click

from inrun import __version__
from inrun.errors import ConfigurationError, InrunError

#: Every command with the module that has it, in the groups of the help.
GROUPS = {
    "Train and score": {
        "demo": "train_commands",
        "train": "train_commands",
        "replay": "replay_command",
    },
    "Look and ask": {
        "report": "report_command",
        "serve": "serve_command",
        "scores": "ledger_commands",
        "groups": "ledger_commands",
        "info": "ledger_commands",
        "audit": "ledger_commands",
    },
    "Act": {
        "curate": "ledger_commands",
        "shares": "ledger_commands",
    },
    "Look after the books": {
        "verify": "trust_commands",
        "repair": "trust_commands",
        "merge": "trust_commands",
    },
    "Measure": {
        "bench": "bench_command",
        "fidelity": "fidelity_command",
        "reproduce": "reproduce_command",
    },
}
COMMANDS = {name: module for commands in GROUPS.values() for name, module in commands.items()}


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

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the groups, each command with the whole first sentence of its help."""
        for title, names in GROUPS.items():
            rows = [(name, _first_sentence(self.get_command(context, name))) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=12)


def _first_sentence(command: click.Command | None) -> str:
    text = " ".join(((command and command.help) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?!]) ", text, maxsplit=1)[0]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="inrun")
def cli() -> None:
    """Tell what every training sample was worth to the model you actually trained, while you train it.

    Begin with `inrun demo`: a small model, its scores and a report in some minutes. RUN is the folder of a run.
    """


def main() -> None:
    """Run the command; exit with 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    code = _run()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _leave(code)
    if code:
        sys.exit(code)


def _run() -> int:
    try:
        code = cli.main(standalone_mode=False)
        return code if isinstance(code, int) else 0  # click hands over what Exit was raised with
    except click.UsageError as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except ConfigurationError as error:
        click.echo(f"inrun: {error}", err=True)
        return 2
    except InrunError as error:
        click.echo(f"inrun: {error}", err=True)
        return 1


def _leave(code: int) -> NoReturn:
    """End one process of several without taking the interpreter down.

    DistributedDataParallel keeps its group for good, and with it gloo's threads, also after ``destroy_process_group`` (torch 2.13).
    One of them that wakes while the interpreter ends aborts a process whose work is done, and the launcher calls the job failed.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
