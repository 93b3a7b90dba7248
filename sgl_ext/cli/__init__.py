"""Command line ``sgl-ext``: one module per group of commands."""

from sgl_ext.cli import caches, configuration, contexts, servers, stored
from sgl_ext.cli.app import app

__all__ = ["app", "caches", "configuration", "contexts", "main", "servers", "stored"]


def main() -> None:
    """Runs the command line."""
    app()
