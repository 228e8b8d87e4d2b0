"""Experiment tracking that a training loop never asks about: wandb, TensorBoard, both, or an object that keeps
silent. The record is the ledger and metrics.jsonl; a tracker that fails is reported once and training goes on."""

import importlib.util
import json
import math
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

# What wandb's agent sets for the trial that it starts. A stage is a run of its own: with these it would be taken
# for the trial, and the next stage would write over it.
OF_A_TRIAL = ("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_RESUME")


class TrackingSection(Protocol):
    """What is read of a configuration: `wandb` is offline, online or disabled."""

    wandb: str
    project: str
    tensorboard: bool


class Silent:
    """Takes everything and keeps nothing."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Tracker:
    """Passes values on to every writer that works, and at the end what the best loss was and what it took."""

    def __init__(self, writers: list["Wandb | TensorBoard"]):
        self._writers = writers
        self._best: dict[str, float] = {}

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Numbers of a step; `loss` or `validation_loss`, `dollars` and `tokens` among them make the summary."""
        self._see(values, step)
        self._each("log", dict(values), step)

    def finish(self) -> None:
        self._each("finish", dict(self._best))
        self._writers = []

    def _see(self, values: Mapping[str, Any], step: int) -> None:
        """Validation losses count where there are any, training losses before the first of them."""
        kind = "validation" if "validation_loss" in values else "training"
        loss = values.get("validation_loss", values.get("loss"))
        before = self._best.get("best_loss_is", kind)
        if loss is None or (kind == "training" and before == "validation"):
            return
        if kind == before and not loss < self._best.get("best_loss", math.inf):
            return
        self._best = {"best_loss": loss, "best_loss_is": kind, "best_loss_step": step}
        for name in ("dollars", "tokens", "seconds"):
            if name in values:
                self._best[f"{name}_to_best_loss"] = values[name]

    def _each(self, method: str, *arguments: Any) -> None:
        for writer in list(self._writers):
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:
                _warn(writer.name, error)
                self._writers.remove(writer)


class Wandb:
    """One wandb run."""

    name = "wandb"

    def __init__(self, run):
        self._run = run

    def log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)

    def finish(self, summary: dict[str, Any]) -> None:
        self._run.summary.update(summary)
        self._run.finish()


class TensorBoard:
    """One folder of event files."""

    name = "tensorboard"

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=1, default=str)}\n```")

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        for name, value in summary.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"summary/{name}", value, summary["best_loss_step"])
        self._writer.close()


def need(section: TrackingSection) -> None:
    """Raise ValueError if tracking is asked for that is not installed and that nobody would miss in silence."""
    if section.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "tracking.tensorboard is true but the package tensorboard is not installed: "
            "pip install 'moe-disco[tensorboard]', or leave it out"
        )


def tracker(
    section: TrackingSection, run: Path, group: str, name: str, config: Mapping[str, Any]
) -> Silent | Tracker:
    """Something with `log(values, step)` and `finish()`.

    One wandb run a stage attempt (`name`, for example `train/0#1`), one group a pipeline. Files go to
    `run`/wandb; offline, no login is asked for, and `wandb sync` sends them later: every attempt is a run of its
    own, so that nothing overlaps. Steps must not go back within a run: wandb drops those rows. Event files of
    TensorBoard go to `run`/tensorboard/`name`. Silent when nothing is asked for (or the environment has
    WANDB_MODE=disabled), when wandb is missing, and, after one warning, when it cannot start.
    """
    writers = [_wandb(section, run, group, name, config)]
    if section.tensorboard:
        need(section)
        try:
            writers.append(TensorBoard(run / "tensorboard" / name, config))
        except Exception as error:
            _warn("tensorboard", error)
    writers = [writer for writer in writers if writer is not None]
    return Tracker(writers) if writers else Silent()


def _wandb(section: TrackingSection, run: Path, group: str, name: str, config: Mapping[str, Any]) -> Wandb | None:
    if section.wandb == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        return None
    except Exception as error:  # installed, but broken
        return _warn("wandb", error)
    for variable in OF_A_TRIAL:
        os.environ.pop(variable, None)
    try:
        run.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_CACHE_DIR", str(run / "wandb" / "cache"))  # a home may be read-only
        return Wandb(
            wandb.init(
                mode=section.wandb,
                project=section.project,
                group=group,
                name=name,
                id=secrets.token_hex(6),
                job_type=name.partition("#")[0],
                dir=str(run),
                config=dict(config),
                reinit="create_new",
                settings=_settings(wandb),
            )
        )
    except Exception as error:
        return _warn("wandb", error)


def trial() -> str | None:
    """The id of the trial of a wandb sweep that this process is, or None."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def report_trial(project: str, run: Path, values: Mapping[str, float]) -> None:
    """Send what a trial came to back to its sweep, under the id that the sweep gave it. Warns if that fails."""
    try:
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        settings = {"dir": str(run), "job_type": "trial", "mode": mode, "settings": _settings(wandb)}
        sent = wandb.init(project=project, id=trial(), **settings)
        sent.log(dict(values))
        sent.finish()
    except Exception as error:
        warnings.warn(f"the sweep could not be told what this trial came to: {error}", stacklevel=2)


def _settings(wandb):
    return wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)


def _warn(name: str, error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    off = "wandb=disabled" if name == "wandb" else "tensorboard=false"
    warnings.warn(
        f"{name} does not work here ({reason}): training goes on without it; metrics.jsonl has everything "
        f"(tracking.{off} silences this)",
        stacklevel=3,
    )
