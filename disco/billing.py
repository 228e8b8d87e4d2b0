"""Ledger rows for time that no training process bills itself: stages without training, and the end of attempts
that were killed."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from disco.job import Job, Price
from disco.record import LEDGER_SECONDS, card_of
from launch.ledger import Ledger, phase_of, read


@contextlib.contextmanager
def billed(run: Path, name: str, price: Price) -> Iterator[None]:
    """Bill this machine to the run's ledger while the block makes stage `name`, which trains nothing.

    A row every ten seconds, so that a kill loses at most that much; the last one is `done`, or `killed` if the
    block raises.
    """
    rows, over = _Rows(run, name, price), threading.Event()

    def keep() -> None:
        while not over.wait(LEDGER_SECONDS):
            rows.held("held")

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    status = "killed"
    try:
        yield
        status = "done"
    finally:
        over.set()
        thread.join()
        rows.held(status)


class _Rows:
    """Rows of one attempt at a stage, each for the time since the one before."""

    def __init__(self, run: Path, name: str, price: Price):
        self.ledger, self.price = Ledger(run / "ledger.jsonl"), price
        last = name.rpartition("/")[2]
        self.attempt = 1 + max((row["attempt"] for row in _of(self.ledger, name)), default=0)
        self.named = {
            "phase": name,
            "stage": name.split("/")[-2] if last.isdigit() else last,
            "submodel": int(last) if last.isdigit() else None,
            "trains": False,
        }
        self.device = this_machine()
        self.since = time.time()

    def held(self, status: str) -> None:
        now = time.time()
        seconds, self.since = now - self.since, now
        row = self.named | {"time": now, "attempt": self.attempt, "status": status, "seconds": seconds}
        self.ledger.append(row | {"devices": 1} | priced(self.price, self.device, seconds))


@contextlib.contextmanager
def what_was_lost(job: Job, devices: int) -> Iterator[None]:
    """If the block raises, bill the time since the last row that the job's process wrote: it could not."""
    ledger, phase = Ledger(Path(job.run) / "ledger.jsonl"), job.phase
    before = max((row["attempt"] for row in _of(ledger, phase)), default=0)
    started = time.time()
    try:
        yield
    except BaseException:
        own = [row for row in _of(ledger, phase) if row["attempt"] > before]
        seconds = time.time() - started - sum(row["seconds"] for row in own)
        if seconds > 0:
            device = (own[-1]["device"], own[-1].get("ran_on")) if own else this_machine()
            row = {"time": time.time(), "phase": phase, "stage": job.stage, "submodel": job.submodel}
            row |= {"status": "killed", "precision": job.section.precision}
            row |= {"attempt": own[-1]["attempt"] if own else before + 1, "step": own[-1]["step"] if own else 0}
            row |= {"seconds": seconds, "devices": devices, "tokens": 0, "flops": 0, "peak_memory_bytes": 0}
            ledger.append(row | priced(job.price, device, seconds * devices))
        raise


def priced(price: Price, device: tuple[str, str | None], seconds: float) -> dict:
    """The fields of a row that say what was held and at which price; `seconds` are device-seconds."""
    card, known = device
    return {
        "device": card,
        "ran_on": known,
        "priced_as": price.priced_as,
        "price_per_hour": price.dollars_per_hour,
        "price_source": price.source,
        "price_as_of": price.as_of,
        "dollars": seconds * price.dollars_per_hour / 3600,
        "kind": "measured" if known == price.priced_as else "simulated",
    }


def _of(ledger: Ledger, phase: str) -> list[dict]:
    return [row for row in read(ledger.path) if phase_of(row) == phase]


def this_machine() -> tuple[str, str | None]:
    return card_of(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
