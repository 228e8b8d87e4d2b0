"""Load traces of a training stage: what `fsep simulate` and `fsep plot` read."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import nn

import fsep

FILE = "loads.npz"


class Loads:
    """Records the tokens that each process sends to each expert, step by step, into `folder`.

    A stage that resumes at `step` goes on with the trace of the steps before; one that was recorded by another
    number of processes, or with other micro-batches, is begun anew.
    """

    def __init__(self, model: nn.Module, folder: Path, step: int) -> None:
        self._path, self._recorder = folder / FILE, fsep.TraceRecorder(model)
        self._earlier = None
        if step and self._path.exists():
            before = fsep.LoadTrace.load(self._path)
            kept = before.iteration < step
            if kept.any():
                self._earlier = fsep.LoadTrace(before.tokens[kept], before.iteration[kept], before.layer)

    @contextlib.contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Record what runs inside as training step `step`."""
        with self._recorder:
            yield
            self._recorder.end_step(step)

    def end_microbatch(self) -> None:
        """One micro-batch has run."""
        self._recorder.end_microbatch()

    def save(self) -> None:
        """Write all steps so far; a collective call."""
        trace = self._recorder.trace()
        if dist.get_rank():
            return
        before = self._earlier
        if before is not None and before.tokens.shape[1:] == trace.tokens.shape[1:]:
            trace = fsep.LoadTrace(
                np.concatenate([before.tokens, trace.tokens]),
                np.concatenate([before.iteration, trace.iteration]),
                trace.layer,
            )
        trace.save(self._path)
