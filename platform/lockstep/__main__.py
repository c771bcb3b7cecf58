"""`python -m lockstep` is the `lockstep` command."""

from lockstep.cli.entry import run

run()
