"""The queue over slots: order, retries, lost slots, Ctrl-C, and what is shown."""

import _thread
import io
import signal
import threading

import pytest
from rich.console import Console

from disco.backends.crew import DONE, FAILED, SlotLost, StepError, line, table, work_through
from disco.backends.plan import Step


def steps(count: int) -> list[Step]:
    return [Step(name=f"train-{k}", stage=f"train/{k}", about="") for k in range(count)]


def run(count, slots, make, retries=0, console=None, **options):
    console = console or Console(file=io.StringIO(), force_terminal=False)
    return work_through(steps(count), slots, make, retries=retries, console=console, seconds=0.01, **options)


def test_every_step_is_made_once_and_no_slot_twice_at_a_time():
    busy, made, lock = set(), [], threading.Lock()

    def make(step, slot, progress, stop):
        with lock:
            assert slot not in busy
            busy.add(slot)
        stop.wait(0.01)
        with lock:
            busy.remove(slot)
            made.append(step.name)

    ended = run(7, ["a", "b", "c"], make)
    assert sorted(made) == [f"train-{k}" for k in range(7)]
    assert {entry.state for entry in ended} == {DONE}


@pytest.mark.parametrize(
    ("retries", "fails", "state", "tried"), [(2, 2, DONE, 3), (1, 2, FAILED, 2), (0, 1, FAILED, 1)]
)
def test_a_failed_step_is_tried_again_so_many_times_and_the_others_go_on(retries, fails, state, tried):
    count = {"train-1": 0}

    def make(step, slot, progress, stop):
        if step.name == "train-1":
            count["train-1"] += 1
            if count["train-1"] <= fails:
                raise StepError("exit code 3: no memory", again=True)

    ended = run(3, ["a"], make, retries)
    assert [entry.state for entry in ended] == [DONE, state, DONE]
    assert count["train-1"] == tried
    assert ended[1].failures == min(fails, tried)


def test_an_error_that_would_come_again_is_not_tried_again():
    tried = []

    def make(step, slot, progress, stop):
        tried.append(step.name)
        raise StepError("exit code 2", again=False) if step.name == "train-0" else ValueError("a defect")

    ended = run(2, ["a"], make, retries=5)
    assert tried == ["train-0", "train-1"]
    assert [entry.reason for entry in ended] == ["exit code 2", "a defect"]


def test_a_lost_slot_leaves_its_steps_to_the_others():
    def make(step, slot, progress, stop):
        if slot == "a":
            raise SlotLost("a is out of reach", again=True)
        stop.wait(0.05)

    ended = run(4, ["a", "b"], make, retries=3)
    assert sorted(entry.state for entry in ended) == [DONE, DONE, DONE, FAILED]
    ended = run(2, ["a"], make)
    assert [entry.reason for entry in ended] == ["a is out of reach", "no slot was left to make it in"]


@pytest.fixture
def ctrl_c_heard():
    """SIGINT raises, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_heard")
def test_ctrl_c_stops_every_slot():
    started, stopped = [], []

    def make(step, slot, progress, stop):
        started.append(slot)
        if len(started) == 2:
            _thread.interrupt_main()
        stop.wait(30)
        stopped.append(slot)

    with pytest.raises(KeyboardInterrupt):
        run(5, ["a", "b"], make)
    assert sorted(stopped) == ["a", "b"]


ROW = {"step": 30, "steps": 40, "loss": 2.5, "tokens_per_s": 1234.5, "seconds": 60.0, "dollars": 0.01}


def make_and_tell(step, slot, progress, stop):
    progress.metrics = ROW
    stop.wait(0.05)


def test_without_a_terminal_changes_are_lines():
    console = Console(file=io.StringIO(), force_terminal=False, width=300)
    ended = run(2, ["cpu:0"], make_and_tell, console=console)
    said = console.file.getvalue().splitlines()
    assert said[-1] == "train/1  done  on cpu:0  step 30/40  loss 2.5000  1,234 tokens/s  0:00:20 left  $0.01000"
    assert len(said) <= 4
    ended[0].failures, ended[0].state, ended[0].reason = 2, FAILED, "exit code 3"
    assert line(ended[0]).startswith("train/0  failed, failed 2x  on cpu:0")
    assert line(ended[0]).endswith("exit code 3")


def test_on_a_terminal_it_is_a_table():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    ended = run(2, ["cpu:0"], make_and_tell, console=console)
    assert "tokens/s" in console.file.getvalue()
    assert table(ended).row_count == 2
