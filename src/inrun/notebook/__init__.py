"""What a notebook shows: tables that are escaped, and a bar that needs no widgets. Imports no torch, and IPython only inside it."""

from inrun.notebook.html import block, facts, lines, shown, table
from inrun.notebook.scores import KINDS, marked
from inrun.notebook.shell import notebook_shell

__all__ = ["KINDS", "block", "facts", "lines", "marked", "notebook_shell", "shown", "table"]
