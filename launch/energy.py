"""Energy that NVIDIA cards report (NVML, by the optional package nvidia-ml-py); nothing where they do not."""

import os
from collections.abc import Callable


def meter(processes: int) -> Callable[[], float] | None:
    """A function that returns the kWh of this job's cards since it was last called, or None without NVML.

    `processes` is the number of the job's processes, one a card. None too if some of them run on another
    machine, whose cards cannot be read from here, and for cards older than Volta, which do not count.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", processes)) != processes:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        cards = [_handle(pynvml, index) for index in range(processes)]

        def joules() -> float:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(card) for card in cards) / 1000

        last = joules()
    except Exception:  # no package, no driver, no permission, no counter: NVML has an exception for each
        return None

    def since() -> float:
        nonlocal last
        now = joules()
        used, last = now - last, now
        return used / 3.6e6

    return since


def _handle(pynvml, index: int):
    """The card that CUDA calls `index`: CUDA_VISIBLE_DEVICES names cards by number or by UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[index].strip() if visible else str(index)
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
