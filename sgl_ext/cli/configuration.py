"""Commands for a configuration and the machine: init, describe, doctor, calibrate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_ext import doctor as _doctor
from sgl_ext.cli.app import (
    ConfigOption,
    JsonOption,
    app,
    configuration,
    fail,
    failing,
    print_json,
    progress,
)
from sgl_ext.cli.starters import STARTERS, starter
from sgl_ext.preflight import Check


@app.command()
def init(
    use: Annotated[str, typer.Argument(metavar="|".join(STARTERS), help="What the server is for.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045  (typer reads it)
        typer.Option(help="File to write, which must not exist; standard output if none is given."),
    ] = None,
    directory: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            help="Directory on an SSD; repeat the option for each device. For rag, a folder for "
            "stored contexts is created in each."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write JSON, which has no comments.")
    ] = False,
) -> None:
    """Writes a commented configuration to start from, sized for this machine."""
    if use not in STARTERS:
        fail(f"unknown use {use!r}; choose one of {', '.join(STARTERS)}", 2)
    with failing(OSError):
        text = starter(use, [each.absolute() for each in directory or ()])
        if as_json:
            text = json.dumps(yaml.safe_load(text), indent=1) + "\n"
        if out is None:
            sys.stdout.write(text)
            return
        try:
            file = out.open("x", encoding="utf-8")
        except FileExistsError:
            fail(f"{out} exists already; remove it, or choose another --out")
        try:
            with file:
                file.write(text)
        except OSError:
            out.unlink(missing_ok=True)
            raise
    typer.echo(f"wrote {out}; check it with: sgl-ext doctor --config {out}", err=True)


@app.command()
def describe(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Prints the resolved configuration, defaults included."""
    resolved = configuration(config).resolved()
    if as_json:
        print_json(resolved)
    else:
        print(yaml.safe_dump(resolved, sort_keys=False))


@app.command()
def doctor(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    model_path: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Model folder. Starts a server on it to measure how far linked chunks diverge."
        ),
    ] = None,
) -> None:
    """Checks whether a configuration would run on this machine; exits with 0 only if it would."""
    resolved = configuration(config)
    with progress("checking the machine") as tell:
        checks = _doctor.examine(resolved)
        if model_path is not None:
            from sgl_ext.doctor_model import linking

            tell("measuring linked chunks", None, None)
            checks.append(linking(model_path, resolved))
    if as_json:
        print_json(_doctor.as_json(checks, resolved))
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
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures the costs of prefill, decode and tier loads for the cost model.

    Further arguments go to SGLang.
    """
    import msgspec

    from sgl_ext.calibration.profile import calibrate as measure

    chosen = configuration(config)
    with failing(OSError, ValueError), progress("starting a server") as shown:

        def tell(tier: str, done: int, of: int) -> None:
            shown(f"measuring with {tier}", done, of)

        profile, path = measure(model_path, chosen, context.args, tell)
    if as_json:
        print_json({"path": str(path), "profile": msgspec.to_builtins(profile)})
        return
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


def _print(checks: list[Check]) -> None:
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    table = Table("check", "", "found", "to do", box=None, pad_edge=False)
    for check in checks:
        verdict = f"[{colours[check.verdict]}]{check.verdict}[/]"
        table.add_row(escape(check.name), verdict, escape(check.found), escape(check.todo))
    Console().print(table)
    run = _doctor.would_run(checks)
    print("This configuration would run." if run else "This configuration would not run.")
