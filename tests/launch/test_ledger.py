import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.ledger import Ledger, LedgerError, read, totals, wasted_shares


def row(stage="train", submodel=None, attempt=1, status="held", seconds=10.0, step=None, **more):
    base = {
        "stage": stage,
        "submodel": submodel,
        "attempt": attempt,
        "status": status,
        "devices": 1,
        "seconds": seconds,
        "dollars": seconds * 0.36 / 3600,
        "kind": "simulated",
        "tokens": 100,
        "flops": 7,
        "peak_memory_bytes": 5,
    }
    return base | ({} if step is None else {"step": step}) | more


def test_rows_come_back_in_order(tmp_path):
    ledger = Ledger(tmp_path / "run" / "ledger.jsonl")
    rows = [row(submodel=k, note="ü") for k in range(3)]
    for value in rows:
        ledger.append(value)
    assert read(ledger.path) == rows
    assert read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("torn", [b'{"stage": "tra', b"\x00\x00\x00", b"{", b"17", b'{"a": "\xff'])
def test_a_torn_last_line_is_skipped_and_then_mended(tmp_path, torn):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row(attempt=1))
    with open(ledger.path, "ab") as file:
        file.write(torn)
    assert len(read(ledger.path)) == 1
    ledger.append(row(attempt=2))
    assert [value["attempt"] for value in read(ledger.path)] == [1, 2]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_text(json.dumps(row(attempt=1)))
    ledger.append(row(attempt=2))
    assert [value["attempt"] for value in read(ledger.path)] == [1, 2]


def test_a_torn_line_longer_than_a_block(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row(attempt=1, note="x" * 200_000))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:150_000])
    ledger.append(row(attempt=2))
    assert [value["attempt"] for value in read(ledger.path)] == [1, 2]


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(0, 10_000))
def test_cut_anywhere_loses_at_most_the_last_row(tmp_path_factory, cut):
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    for attempt in range(4):
        ledger.append(row(attempt=attempt))
    whole = ledger.path.read_bytes()
    kept = whole[: cut % (len(whole) + 1)]
    ledger.path.write_bytes(kept)
    before = read(ledger.path)
    assert len(before) >= kept.count(b"\n")
    ledger.append(row(attempt=9))
    assert read(ledger.path) == [*before, row(attempt=9)]


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(row()) + "\nnonsense\n" + json.dumps(row()) + "\n")
    with pytest.raises(LedgerError, match="line 2: not a JSON object"):
        read(path)


def test_incomplete_and_nan_rows_are_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="without stage, kind"):
        ledger.append({key: value for key, value in row().items() if key not in ("stage", "kind")})
    with pytest.raises(LedgerError, match="not finite"):
        ledger.append(row(seconds=float("nan")))
    assert not ledger.path.exists()


def test_processes_append_side_by_side_and_a_killed_one_harms_nobody(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from launch.ledger import Ledger\n"
        "from tests_row import row\n"
        "ledger = Ledger(sys.argv[1])\n"
        "for step in range(int(sys.argv[2])): ledger.append(row(step=step, note='n' * 5000))\n"
    )
    (tmp_path / "tests_row.py").write_text(
        f"def row(**more):\n    return {row()!r} | more\n",
    )
    path = tmp_path / "ledger.jsonl"
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    start = [sys.executable, "-c", program, str(path)]
    endless = subprocess.Popen([*start, "1000000", root], env=environment)
    others = [subprocess.Popen([*start, "20", root], env=environment) for _ in range(2)]
    while not path.exists():
        time.sleep(0.01)
    endless.send_signal(signal.SIGKILL)
    endless.wait()
    assert [process.wait() for process in others] == [0, 0]
    Ledger(path).append(row(attempt=5))
    rows = read(path)
    assert rows[-1]["attempt"] == 5 and len(rows) >= 41


def test_totals_by_stage_submodel_and_device():
    rows = [
        row("train", 0, seconds=100, devices=2, dollars=1.0, device="cpu"),
        row("train", 0, seconds=50, devices=2, dollars=0.5, device="cpu"),
        row("train", 1, seconds=120, devices=1, dollars=0.6, peak_memory_bytes=9, device="gpu"),
        row("finetune", seconds=10, dollars=3.0, kind="measured", device="gpu"),
    ]
    stages = totals(rows)
    assert list(stages) == ["train", "finetune"]
    train = stages["train"]
    assert train.device_seconds == 2 * 150 + 120 and train.dollars == pytest.approx(2.1)
    assert train.makespan_seconds == 150 and train.device_hours == 420 / 3600
    assert (train.tokens, train.flops, train.peak_memory_bytes) == (300, 21, 9)
    assert train.kinds == {"simulated"} and stages["finetune"].kinds == {"measured"}
    assert train.wasted_dollars == 0 and train.wasted_device_hours == 0
    assert totals(rows, "device")["gpu"].dollars == pytest.approx(3.6)
    by_pair = totals(rows, lambda value: (value["stage"], value["submodel"]))
    assert by_pair["train", 1].device_seconds == 120
    assert totals([]) == {}


def test_waste_of_a_killed_attempt_is_what_came_after_its_last_checkpoint():
    rows = [
        row(attempt=1, status="startup", step=0, seconds=5),
        row(attempt=1, step=100, seconds=10),
        row(attempt=1, step=200, seconds=10),
        row(attempt=1, step=240, seconds=4),  # killed here; the checkpoint was at 150
        row(attempt=2, status="startup", step=150, seconds=5),
        row(attempt=2, step=300, seconds=15),
        row(attempt=2, status="done", step=300, seconds=1),
    ]
    assert wasted_shares(rows) == [0, 0, 0.5, 1, 1, 0, 0]
    assert totals(rows)["train"].wasted_device_seconds == 5 + 4 + 5
    assert totals(rows)["train"].makespan_seconds == 50 - 14


def test_two_kills_and_a_restart_from_nothing():
    rows = [
        row(attempt=1, status="startup", step=0),
        row(attempt=1, step=10),
        row(attempt=2, status="startup", step=0),  # no checkpoint yet: all of attempt 1 is lost
        row(attempt=2, step=20),
        row(attempt=3, status="startup", step=20),
        row(attempt=3, status="done", step=30),
    ]
    assert wasted_shares(rows) == [1, 1, 0, 0, 1, 0]


def test_a_stage_done_twice_wastes_the_first_run_wholly():
    rows = [
        row(attempt=1, status="startup", step=0),
        row(attempt=1, status="done", step=30),
        row(attempt=2, status="startup", step=0),
        row(attempt=2, status="held", step=10),
        row(stage="merge", attempt=1, status="done"),
        row(stage="merge", attempt=2, status="done"),
    ]
    assert wasted_shares(rows) == [1, 1, 0, 0, 1, 0]


def test_submodels_do_not_mix_and_killed_rows_are_waste():
    rows = [
        row(submodel=0, attempt=1, status="done", step=9),
        row(submodel=1, attempt=2, status="done", step=9),
        row(submodel=2, attempt=1, status="killed", step=9),
        row(phase="random_split/train/0", attempt=2, submodel=0, status="done", step=9),
    ]
    assert wasted_shares(rows) == [0, 0, 1, 0]


def test_killed_between_its_last_row_and_the_end_of_the_stage():
    rows = [
        row(attempt=1, status="startup", step=0),
        row(attempt=1, status="held", step=80),
        row(attempt=1, status="done", step=100),
        row(attempt=2, status="startup", step=80),
        row(attempt=2, status="done", step=100),
    ]
    assert wasted_shares(rows) == [0, 0, 1, 1, 0]


def test_attempts_without_a_start_up_row_began_at_nothing():
    rows = [row(attempt=1, step=10), row(attempt=1, step=20), row(attempt=2, step=15), row(attempt=2, step=20)]
    assert wasted_shares(rows) == [1, 1, 0, 0]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 30), max_size=4)), min_size=1, max_size=5))
def test_kept_steps_are_each_paid_once(attempts):
    """However often it is killed, what is not wasted is one undisturbed run up to the last step reached."""
    rows, reached = [], 0
    for attempt, (start, pieces) in enumerate(attempts, start=1):
        start = min(start, reached) if attempt > 1 else 0
        step = start
        rows.append(row(attempt=attempt, status="startup", step=start, seconds=0))
        for piece in pieces:
            rows.append(row(attempt=attempt, step=step + piece, seconds=piece))
            step += piece
        reached = step
    kept = sum((1 - share) * value["seconds"] for share, value in zip(wasted_shares(rows), rows, strict=True))
    assert kept == pytest.approx(reached)
