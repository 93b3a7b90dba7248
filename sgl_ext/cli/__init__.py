"""Command line ``sgl-ext``: one module per group of commands."""

from sgl_ext.cli import caches, configuration, contexts, demonstrations, servers, stored
from sgl_ext.cli.app import app
from sgl_ext.cli.top import top

__all__ = [
    "app",
    "caches",
    "configuration",
    "contexts",
    "demonstrations",
    "main",
    "servers",
    "stored",
    "top",
]


def main() -> None:
    """Runs the command line."""
    app()
