"""Experiment tracking that a training loop never asks about: wandb, or an object that keeps silent."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class TrackingSection(Protocol):
    """What is read of a configuration: `wandb` is offline, online or disabled."""

    wandb: str
    project: str


class Silent:
    """Takes everything and keeps nothing."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Wandb:
    """One wandb run. The first failure is reported once; from then on it is silent, for training must go on."""

    def __init__(self, run):
        self._run = run

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._try("log", dict(values), step=step)

    def finish(self) -> None:
        self._try("finish")

    def _try(self, method: str, *args, **kwargs) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*args, **kwargs)
        except Exception as error:
            _warn(error)
            self._run = None


def tracker(
    section: TrackingSection, run: Path, group: str, name: str, config: Mapping[str, Any]
) -> Silent | Wandb:
    """Something with `log(values, step)` and `finish()`.

    One wandb run a stage attempt (`name`, for example `train/0#1`), one group a pipeline. Files go to
    `run`/wandb; offline, no login is asked for, and `wandb sync` sends them later. Silent when
    `section.wandb` is disabled (or the environment has WANDB_MODE=disabled), when the package is missing, and,
    after one warning, when wandb cannot start. Steps must not go back within a run: wandb drops those rows.
    """
    if section.wandb == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return Silent()
    try:
        import wandb
    except ImportError:
        return Silent()
    except Exception as error:  # installed, but broken
        _warn(error)
        return Silent()
    try:
        run.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_CACHE_DIR", str(run / "wandb" / "cache"))  # a home may be read-only
        started = wandb.init(
            mode=section.wandb,
            project=section.project,
            group=group,
            name=name,
            job_type=name.partition("#")[0],
            dir=str(run),
            config=dict(config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
    except Exception as error:
        _warn(error)
        return Silent()
    return Wandb(started)


def _warn(error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    warnings.warn(
        f"wandb does not work here ({reason}): training goes on without it; metrics.jsonl has everything "
        "(tracking.wandb=disabled silences this)",
        stacklevel=3,
    )
