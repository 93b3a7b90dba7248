"""Tools for sgl_ext. The server itself is started with SGLang's own command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer
import yaml
from rich.console import Console
from rich.table import Table

from sgl_ext import SUPPORTED_SGLANG, __version__
from sgl_ext import doctor as _doctor
from sgl_ext.config import ExtConfig, load
from sgl_ext.config.source import ConfigError
from sgl_ext.errors import ExtError
from sgl_ext.preflight import Check

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

_Config = Annotated[
    Optional[str],  # noqa: UP045  (typer reads it)
    typer.Option(
        "--config",
        "--ext-config",
        metavar="FILE|JSON",
        help="Configuration, in the format of the server's --ext-config.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def describe(config: _Config = None, as_json: _Json = False) -> None:
    """Prints the resolved configuration, defaults included."""
    resolved = _load(config).resolved()
    print(json.dumps(resolved, indent=1) if as_json else yaml.safe_dump(resolved, sort_keys=False))


@app.command()
def doctor(
    config: _Config = None,
    as_json: _Json = False,
    model_path: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads it)
        typer.Option(
            help="Model folder. Starts a server on it to measure how far linked chunks diverge."
        ),
    ] = None,
) -> None:
    """Checks whether a configuration would run on this machine; exits with 0 only if it would."""
    resolved = _load(config)
    checks = _doctor.examine(resolved)
    if model_path is not None:
        from sgl_ext.doctor_model import linking

        checks.append(linking(model_path, resolved))
    if as_json:
        print(json.dumps(_doctor.as_json(checks, resolved), indent=1))
    else:
        _print(checks)
    if not _doctor.would_run(checks):
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def calibrate(
    context: typer.Context,
    model_path: Annotated[
        Path, typer.Option(help="Model folder, as for the server's --model-path.")
    ],
    config: _Config = None,
) -> None:
    """Measures computing, decoding and loading for the tiers; further arguments go to SGLang."""
    from sgl_ext.calibration.profile import calibrate as measure

    try:
        profile, path = measure(model_path, _load(config), context.args)
    except ExtError as error:
        typer.echo(f"sgl_ext: {error}", err=True)
        raise typer.Exit(1) from None
    compute = profile.compute
    print(
        f"compute: {1e3 * compute.overhead:.1f} ms per forward, {1e6 * compute.per_token:.1f} us "
        f"per token, {1e9 * compute.per_pair:.2f} ns per pair of a token and a preceding token"
    )
    if (decode := profile.decode) is not None:
        print(
            f"decode: {1e3 * decode.overhead:.1f} ms per step, "
            f"{1e3 * decode.per_request:.2f} ms per request"
        )
    for tier, cost in profile.loads.items():
        print(
            f"loading from {tier}: {1e3 * cost.latency:.2f} ms per load, "
            f"{1e6 * cost.per_token:.1f} us per token"
        )
    print(f"wrote {path}")


@app.command()
def store(
    file: Annotated[Path, typer.Argument(help="Text of the context, in UTF-8.")],
    url: Annotated[str, typer.Option(help="URL of the server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        Optional[str],  # noqa: UP045  (typer reads it)
        typer.Option(help="API key of the server, if it has one."),
    ] = None,
    cache_salt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Salt of the tenant that the context belongs to."),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Id of the stored context that the text continues."),
    ] = None,
) -> None:
    """Has a running server store a text on its devices, and prints the id of the context."""
    import time

    from rich.progress import Progress

    from sgl_ext.clusters.client import store as ask

    try:
        text, began = file.read_text(encoding="utf-8"), time.monotonic()
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("waiting", total=None)

            def tell(what: str) -> None:
                stage, _, layers = what.partition(" ")
                done, _, of = layers.partition("/")
                progress.update(
                    bar,
                    description=stage,
                    completed=int(done) if of else None,
                    total=int(of) if of else None,
                )

            found = ask(url, text, api_key=api_key, cache_salt=cache_salt, base=base, tell=tell)
    except (ExtError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"sgl_ext: {error}", err=True)
        raise typer.Exit(1) from None
    seconds, tokens = time.monotonic() - began, found["tokens"]
    per_token = "" if base else f", {1e3 * seconds / tokens:.1f} s per 1,000 tokens"
    typer.echo(f"{tokens} tokens in {seconds:.1f} s{per_token}", err=True)
    print(found["id"])


@app.command()
def cluster(
    record: Annotated[Path, typer.Argument(help="Record of a context that a server has written.")],
    directories: Annotated[
        list[Path], typer.Argument(help="Directories, one per device, as in clusters.directories.")
    ],
    name: Annotated[
        str,
        typer.Option(
            help="Start of the context's id, after stx-; up to 40 letters, digits, - and _."
        ),
    ] = "",
    copies: Annotated[
        int, typer.Option(min=1, max=2, help="Copies of each block, on different devices.")
    ] = 1,
) -> None:
    """Stores a recorded context on devices, so that requests can follow it."""
    import re

    from rich.progress import Progress

    from sgl_ext.clusters.job import store
    from sgl_ext.clusters.paths import new_id

    if not re.fullmatch("[A-Za-z0-9_-]{0,40}", name):
        typer.echo(
            f"sgl_ext: --name {name!r} is invalid; use up to 40 characters of A-Z a-z 0-9 _ -",
            err=True,
        )
        raise typer.Exit(1)
    id_ = new_id(name)
    try:
        with Progress() as progress:
            bar = progress.add_task("layers", total=None)
            store(
                record, id_, directories,
                lambda done, of: progress.update(bar, completed=done, total=of), copies,
            )  # fmt: skip
    except (ExtError, OSError) as error:
        typer.echo(f"sgl_ext: {error}", err=True)
        raise typer.Exit(1) from None
    print(id_)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Runs a benchmark, like python -m sgl_ext.bench: NAME [--quick] [--out DIR]."""
    from sgl_ext.bench.__main__ import main as run

    run(context.args)


@app.command()
def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(help="URLs of the servers; http://127.0.0.1:30000 if none is given."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
) -> None:
    """Shows the tiers of running servers, and the memory that their engines lend each other."""
    from sgl_ext.top import watch

    try:
        watch([url.rstrip("/") for url in urls or ["http://127.0.0.1:30000"]], once=once)
    except KeyboardInterrupt:
        raise typer.Exit from None
    except ExtError as error:
        typer.echo(f"sgl_ext: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def version() -> None:
    """Prints the versions of sgl_ext and of the SGLang release that it supports."""
    print(f"sgl_ext {__version__} for SGLang {SUPPORTED_SGLANG}")


def _print(checks: list[Check]) -> None:
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    table = Table("check", "", "found", "to do", box=None, pad_edge=False)
    for check in checks:
        verdict = f"[{colours[check.verdict]}]{check.verdict}[/]"
        table.add_row(check.name, verdict, check.found, check.todo)
    Console().print(table)
    run = _doctor.would_run(checks)
    print("This configuration would run." if run else "This configuration would not run.")


def _load(source: str | None) -> ExtConfig:
    try:
        return load(source)
    except ConfigError as error:
        typer.echo(f"sgl_ext: {error}", err=True)
        raise typer.Exit(2) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
