import io

import pytest
from rich.console import Console

from disco import progress
from disco.progress import tracked


@pytest.fixture
def clock(monkeypatch):
    """A clock that is put forward by hand."""
    now = [1000.0]
    monkeypatch.setattr("disco.progress.time.monotonic", lambda: now[0])
    return now


def test_lines_now_and_then_where_there_is_no_terminal(clock):
    lines, seen = [], []
    for block in tracked(["ab", "cde", "fghi", "j"], "counting", lines.append, total=10, size=len):
        seen.append(block)
        clock[0] += progress.LINE_SECONDS / 2
    assert seen == ["ab", "cde", "fghi", "j"]
    # 5 of 10 after 30 seconds: as long again; 10 of 10 after 60.
    assert lines == [
        "counting",
        "counting: 5 of 10 documents, 0:00:30 left",
        "counting: 10 of 10 documents, 0:00:00 left",
    ]


def test_an_unknown_total_and_a_long_time(clock):
    lines = []
    for _ in tracked(range(3), "reading", lines.append, unit="files"):
        clock[0] += progress.LINE_SECONDS
    assert lines[1:] == ["reading: 1 files", "reading: 2 files", "reading: 3 files"]
    lines.clear()
    for _ in tracked(range(1), "reading", lines.append, total=101, unit="files"):
        clock[0] += 61.0
    assert lines[1:] == ["reading: 1 of 101 files, 1:41:40 left"]


def test_a_bar_on_a_terminal():
    drawn, lines = io.StringIO(), []
    console = Console(file=drawn, force_terminal=True, width=120)
    assert list(tracked("abcd", "counting", lines.append, total=4, console=console)) == list("abcd")
    assert not lines
    assert "counting" in drawn.getvalue() and "4/4" in drawn.getvalue() and "documents" in drawn.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_inside_ends_the_bar(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with pytest.raises(ZeroDivisionError):
        for item in tracked([1, 0], "dividing", lambda line: None, console=console):
            1 // item
    assert list(tracked([1], "again", lambda line: None, console=console)) == [1]
