"""Shell scripts to read, edit and start by hand. Every word that is not ours is quoted."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

SECRETS = ("WANDB_API_KEY", "HF_TOKEN")  # handed on through the environment, never written


def script(
    lines: Sequence[str],
    *,
    about: str,
    folder: str | Path | None = None,
    setup: str = "",
    header: Sequence[str] = (),
) -> str:
    """A bash script that stops at the first error: `header` comments, `cd folder`, `setup`, then `lines`.

    `setup` and `lines` are shell code as it stands; `about` and `header` become comments.
    """
    text = ["#!/usr/bin/env bash", *header, *(f"# {line}" for line in about.splitlines()), "set -euo pipefail"]
    if folder is not None:
        text.append(f"cd -- {shlex.quote(str(folder))}")
    return "\n".join([*text, *filter(None, [setup]), *lines]) + "\n"


def retrying(command: str, retries: int) -> list[str]:
    """Shell lines that run `command`, again up to `retries` times while it ends with exit code 3 (training that
    failed and has a checkpoint to go on from)."""
    return [
        f"for attempt in $(seq 0 {retries}); do",
        "  code=0",
        f"  {command} || code=$?",
        '  [ "$code" -eq 3 ] || break',
        "done",
        'exit "$code"',
    ]


def write(folder: Path, scripts: dict[str, str]) -> list[Path]:
    """Write the scripts into `folder`, executable, each whole or not at all; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in scripts.items():
        path = folder / name
        partial = path.with_name(f".{name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.chmod(0o755 if name.endswith((".sh", ".sbatch")) else 0o644)
        os.replace(partial, path)
        paths.append(path)
    return paths
