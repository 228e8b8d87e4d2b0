"""Commands that this package adds to `bcd` (see bcd/cli.py)."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command(context_settings={"ignore_unknown_options": True})(train)  # for --train.tokens=1000


def train(
    config: Annotated[Path, typer.Argument(help="file with model, corpus, train, bcd, ... (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="such as train.optimizer=adamw")] = None,
) -> None:
    """Fine-tune or pre-train one model on text: what is stale or missing, and nothing else."""
    from disco import single
    from disco.job import JobError

    try:
        single.run(single.load(config, overrides or []), say=typer.echo)
    except (OSError, JobError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(3 if isinstance(error, JobError) else 2) from None
