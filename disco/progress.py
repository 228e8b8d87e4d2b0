"""How far a long loop has come: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

Item = TypeVar("Item")
LINE_SECONDS = 30.0  # between lines where there is no terminal


def tracked(
    items: Iterable[Item],
    what: str,
    say: Callable[[str], None],
    *,
    total: int | None = None,
    size: Callable[[Item], int] = lambda item: 1,
    unit: str = "documents",
    console: Console | None = None,
) -> Iterator[Item]:
    """`items`, one by one. `what` is done with them; an item counts `size(item)` of `total` (None: not known).

    On a terminal a bar is drawn there, with the time left. Elsewhere `say` gets a line at the start and then every
    LINE_SECONDS.
    """
    console = console or Console()
    if console.is_terminal:
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn(unit))
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=total)
            for item in items:
                yield item
                progress.advance(task, size(item))
        return
    say(what)
    done, started = 0, time.monotonic()
    spoken = started
    for item in items:
        yield item
        done += size(item)
        now = time.monotonic()
        if now - spoken >= LINE_SECONDS:
            spoken = now
            say(f"{what}: {_state(done, total, unit, now - started)}")


def _state(done: int, total: int | None, unit: str, seconds: float) -> str:
    if not total:
        return f"{done:,} {unit}"
    left = round(seconds / max(done, 1) * max(total - done, 0))
    return f"{done:,} of {total:,} {unit}, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
