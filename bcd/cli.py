"""Command line: ``bcd plan``, and the commands of packages beside this one.

A package installed next to bcd adds commands with a module ``bcd_commands`` that has ``register(app)``. bcd needs
none of them.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Block coordinate descent: full-parameter training in the memory of a part."""


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="folder with a config.json, or a shape known by name")],
    gpu: Annotated[str, typer.Option(help="card by name, or its memory in GB")] = "rtx4090",
    sequence: Annotated[int, typer.Option(help="tokens a sequence")] = 1024,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "bf16",
    activation_checkpointing: Annotated[bool, typer.Option(help="recompute activations in backward")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, sizes in bytes")] = False,
) -> None:
    """What trains MODEL fits on which cards, and with what micro-batch."""
    from bcd.memory import gpu_gb, shape
    from bcd.memory import plan as ways

    gb = gpu_gb(gpu)
    config = {"activation_checkpointing": activation_checkpointing}
    rows = ways(shape(model), gb, dtype=dtype, sequence=sequence, config=config)
    if as_json:
        typer.echo(json.dumps([{**asdict(estimate), "fits": fits} for estimate, fits in rows], indent=2))
        return
    table = Table(title=f"{model}, {dtype}, sequences of {sequence}, cards of {gb:g} GB (sizes in GB a card)")
    columns = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total", "host")
    for column in ("method", "cards", "batch", *columns):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for estimate, fits in rows:
        sizes = (f"{getattr(estimate, column) / 1e9:.1f}" for column in columns)
        cards = str(estimate.devices) if fits else f"> {estimate.devices}"
        style = None if fits else "dim"
        table.add_row(estimate.method, cards, str(estimate.micro_batch) if fits else "-", *sizes, style=style)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _add_commands() -> None:
    for path in sorted(Path(__file__).parents[1].glob("*/bcd_commands.py")):
        importlib.import_module(f"{path.parent.name}.bcd_commands").register(app)


def main() -> None:
    """Entry point: bad input prints one line and exits with 2."""
    _add_commands()
    try:
        app()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
