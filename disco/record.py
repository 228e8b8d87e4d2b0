"""What a training run leaves behind while it runs: ledger rows, metrics rows, a progress line, tracking."""

import os
import resource
import sys
import time
from pathlib import Path

import torch

from disco.job import Job
from launch.energy import meter
from launch.hardware import identify
from launch.ledger import Ledger, append, phase_of, read
from launch.tracking import tracker

LEDGER_SECONDS = 10.0


class Recorder:
    """Rank 0's record of one attempt. Every second that the devices are held goes into exactly one ledger row,
    written every ten seconds, so that a killed attempt loses at most that much of its bill."""

    def __init__(self, job: Job, rank: int, world: int, device: torch.device):
        self.job, self.world, self.device = job, world, device
        self.silent = rank != 0
        self._since = _process_start()
        self._last = {"tokens": 0, "flops": 0}
        if self.silent:
            return
        self._energy = meter(world) if device.type == "cuda" else None
        run = Path(job.run)
        self._ledger = Ledger(run / "ledger.jsonl")
        earlier = [row["attempt"] for row in read(run / "ledger.jsonl") if phase_of(row) == job.phase]
        self.attempt = 1 + max(earlier, default=0)
        self._metrics = run / "metrics.jsonl"
        name = f"{job.phase}#{self.attempt}"
        self._track = tracker(job.tracking, run, job.group, name, job.model_dump(mode="json"))

    def begin(self, state: dict) -> None:
        """Training starts, or goes on, from `state`: what came before this moment was start-up."""
        self._last = {"tokens": state["tokens"], "flops": state["flops"]}
        self.held(state, "startup")

    def held(self, state: dict, status: str = "held", at_least: float = 0.0) -> None:
        """A ledger row for the time since the last one, unless that is under `at_least` seconds."""
        now = time.time()
        if self.silent or now - self._since < at_least:
            return
        price, seconds = self.job.price, now - self._since
        card, known = card_of(self.device)
        self._ledger.append(
            ({} if self._energy is None else {"energy_kwh": self._energy()})
            | {
                "time": now,
                "phase": self.job.phase,
                "stage": self.job.stage,
                "submodel": self.job.submodel,
                "attempt": self.attempt,
                "status": status,
                "step": state["step"],
                "device": card,
                "ran_on": known,
                "precision": self.job.section.precision,
                "devices": self.world,
                "seconds": seconds,
                "tokens": state["tokens"] - self._last["tokens"],
                "flops": state["flops"] - self._last["flops"],
                "peak_memory_bytes": _peak_memory(self.device),
                "priced_as": price.priced_as,
                "price_per_hour": price.dollars_per_hour,
                "price_source": price.source,
                "price_as_of": price.as_of,
                "dollars": seconds * self.world * price.dollars_per_hour / 3600,
                "kind": "measured" if known == price.priced_as else "simulated",
            }
        )
        self._since, self._last = now, {"tokens": state["tokens"], "flops": state["flops"]}

    def log(self, row: dict, steps: int) -> None:
        """A metrics row and a progress line. `row["seconds"]` counts useful seconds of all attempts."""
        if self.silent:
            return
        seconds = max(row["seconds"], 1e-9)
        row["steps"] = steps
        row["tokens_per_s"] = row["tokens"] / seconds
        row["dollars"] = seconds * self.world * self.job.price.dollars_per_hour / 3600
        append(self._metrics, {"phase": self.job.phase, "attempt": self.attempt, **row})
        tracked = {key: value for key, value in row.items() if key not in ("step", "expert_share")}
        for name, values in row.items():
            if isinstance(values, list) and name != "expert_share":
                tracked |= {f"{name}/layer_{layer}": value for layer, value in enumerate(values)}
                del tracked[name]
        for layer, shares in enumerate(row.get("expert_share", ())):
            tracked |= {f"expert_share/layer_{layer}/expert_{e}": share for e, share in enumerate(shares)}
        self._track.log(tracked, row["step"])
        left = seconds / row["step"] * (steps - row["step"])
        validation = f"  validation {row['validation_loss']:.4f}" if "validation_loss" in row else ""
        print(
            f"{self.job.phase:<22} step {row['step']:>5}/{steps}  loss {row['loss']:.4f}{validation}  "
            f"{row['tokens_per_s']:,.0f} tokens/s  {_clock(left)} left  ${row['dollars']:.5f} so far",
            flush=True,
        )

    def finish(self, state: dict) -> None:
        if not self.silent:
            self.held(state, "done")
            self._track.finish()


def card_of(device: torch.device) -> tuple[str, str | None]:
    """What the driver calls the device, and its name in the hardware table."""
    if device.type == "cpu":
        return "cpu", "cpu"
    found = torch.cuda.get_device_properties(device)
    return found.name, identify(found.name, found.total_memory / 1e9)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _process_start() -> float:
    """Wall-clock time at which this process started (imports are on the bill too)."""
    try:
        after_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime - after_boot / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return time.time()
