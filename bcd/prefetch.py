"""The next block's kept state on its way to the device while the present block makes its last update."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bcd.groups import GroupState


class Prefetch:
    """Copies of kept states on `device`, made on a stream of their own where that is a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.states: dict[str, GroupState] = {}

    def begin(self, states: Mapping[str, GroupState]) -> None:
        """Start to copy the states of these groups; host memory must not change before `take`."""
        with torch.cuda.stream(self._stream):  # None: no stream
            self.states = {
                name: [{key: self._copy(key, value) for key, value in tensors.items()} for tensors in state]
                for name, state in states.items()
            }

    def take(self) -> dict[str, GroupState]:
        """The copies, for use on the present stream; they belong to the caller from now on."""
        states, self.states = self.states, {}
        if self._stream is not None:
            present = torch.cuda.current_stream(self.device)
            present.wait_stream(self._stream)
            for value in (value for state in states.values() for tensors in state for value in tensors.values()):
                if value.is_cuda:
                    value.record_stream(present)
        return states

    def _copy(self, key: str, value: torch.Tensor) -> torch.Tensor:
        if key == "step":  # a number; where it belongs depends on the optimizer
            return value
        return value.to(self.device, non_blocking=True, copy=True)
