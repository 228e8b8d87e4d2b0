"""Every second is billed, whoever held it and however it ended."""

import io
import subprocess
import sys
import textwrap
import time

import pytest
from rich.console import Console

from disco import billing
from disco.artifacts import ArtifactError
from disco.config import Optimizer
from disco.costs import UNTRAINED, Bill, show
from disco.job import Job, Price
from launch.ledger import Ledger, read, totals, wasted_shares

PRICE = Price(priced_as="cpu", dollars_per_hour=0.36, source="us", as_of="2026-11")


def test_a_stage_without_training_is_billed_from_start_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(billing, "LEDGER_SECONDS", 0.02)
    started = time.time()
    with billing.billed(tmp_path, "baselines/random_split/cluster", PRICE):
        time.sleep(0.1)
    wall = time.time() - started
    rows = read(tmp_path / "ledger.jsonl")
    assert len(rows) >= 2 and {row["status"] for row in rows[:-1]} == {"held"} and rows[-1]["status"] == "done"
    spent = totals(rows)["cluster"]
    assert 0.1 <= spent.device_seconds <= wall and spent.dollars == pytest.approx(spent.device_seconds * 1e-4)
    assert spent.wasted_dollars == 0 and rows[0]["kind"] == "measured" and rows[0]["attempt"] == 1
    assert list(Bill(rows).parts(UNTRAINED)) == ["cluster"]


def test_a_stage_that_fails_is_billed_as_waste_and_so_is_one_made_twice(tmp_path):
    with pytest.raises(OSError), billing.billed(tmp_path, "split/3", PRICE):
        raise OSError
    for _ in range(2):
        with billing.billed(tmp_path, "split/3", PRICE):
            pass
    rows = read(tmp_path / "ledger.jsonl")
    assert [row["status"] for row in rows] == ["killed", "done", "done"]
    assert [row["attempt"] for row in rows] == [1, 2, 3] and wasted_shares(rows) == [1, 1, 0]
    assert (rows[0]["stage"], rows[0]["submodel"]) == ("split", 3)


def test_a_stage_killed_outright_has_been_billed_until_then(tmp_path):
    program = """
        import sys, time, pathlib
        from disco import billing
        from disco.job import Price
        billing.LEDGER_SECONDS = 0.05
        price = Price(priced_as="cpu", dollars_per_hour=0.36, source="us", as_of="2026-11")
        with billing.billed(pathlib.Path(sys.argv[1]), "evaluate", price):
            time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)])
    while len(read(tmp_path / "ledger.jsonl")) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    rows = read(tmp_path / "ledger.jsonl")
    assert {row["status"] for row in rows} == {"held"} and sum(row["seconds"] for row in rows) > 0.1
    with billing.billed(tmp_path, "evaluate", PRICE):
        pass
    assert wasted_shares(read(tmp_path / "ledger.jsonl")) == [1] * len(rows) + [0]


def job(tmp_path, **changed):
    settings = dict(phase="train/0", stage="train", submodel=0, model="m", out="o", rows="r", section=Optimizer())
    settings |= dict(dtype="float32", experts="eager", seed=0, price=PRICE, run=str(tmp_path), group="g")
    return Job(**settings | changed)


def test_what_a_killed_training_process_did_not_bill_is_billed_for_it(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    row = {"stage": "train", "phase": "train/0", "submodel": 0, "attempt": 1, "devices": 2, "dollars": 0.0}
    row |= {"status": "held", "kind": "measured", "step": 7, "device": "cpu", "ran_on": "cpu"}
    ledger.append(row | {"seconds": 50.0})  # of an attempt before
    started = time.time()
    with pytest.raises(RuntimeError), billing.what_was_lost(job(tmp_path), 2):
        time.sleep(0.05)
        ledger.append(row | {"seconds": 0.02, "attempt": 2, "step": 9})
        raise RuntimeError
    lost = read(ledger.path)[-1]
    assert (lost["status"], lost["attempt"], lost["step"], lost["tokens"]) == ("killed", 2, 9, 0)
    assert 0.03 <= lost["seconds"] <= time.time() - started - 0.02
    assert lost["dollars"] == pytest.approx(lost["seconds"] * 2 * 0.36 / 3600)
    with pytest.raises(RuntimeError), billing.what_was_lost(job(tmp_path, phase="train/1"), 1):
        raise RuntimeError
    first = read(ledger.path)[-1]
    assert (first["attempt"], first["step"], first["device"]) == (1, 0, "cpu")
    with billing.what_was_lost(job(tmp_path), 1):
        pass
    assert len(read(ledger.path)) == 4


def test_the_cost_of_a_run_is_shown_by_stage_device_and_submodel(tmp_path):
    with pytest.raises(ArtifactError, match="nothing has been billed yet"):
        show(tmp_path, Console(file=io.StringIO()))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    base = {"attempt": 1, "devices": 1, "kind": "measured", "price_per_hour": 1.0, "price_source": "us"}
    base |= {"price_as_of": "2026-11", "priced_as": "a100", "device": "NVIDIA A100", "tokens": 1000}
    for submodel, status in ((0, "done"), (1, "killed")):
        row = base | {"stage": "train", "phase": f"train/{submodel}", "submodel": submodel, "status": status}
        ledger.append(row | {"seconds": 7200.0, "dollars": 2.0, "step": 5, "energy_kwh": 0.25})
    merge = base | {"stage": "merge", "phase": "merge", "submodel": None, "status": "done", "kind": "simulated"}
    ledger.append(merge | {"seconds": 360.0, "dollars": 0.1, "device": "cpu"})
    console = Console(width=160, record=True, file=io.StringIO())
    show(tmp_path, console)
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert "train 2 2 2,000 2 2 2 0.5" in lines and "merge 0.1 0.1 1,000 0.1 0 0 -" in lines
    assert "NVIDIA A100 2 2 2,000 2 2 2 0.5" in lines and "cpu, as a100 0.1 0.1 1,000 0.1 0 0 -" in lines
    assert "train/0 2 2 1,000 2 0 0 0.25" in lines and "train/1 0 0 1,000 0 2 2 0.25" in lines
    assert "all 2.1 2 3,000 2.1 2 2 0.5" in lines and "a100: $1/h (us, 2026-11)" in lines
    assert "Simulated: what is priced as a card that it did not run on." in lines
