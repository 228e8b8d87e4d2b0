"""Arithmetic of a plan: seconds from operations and bytes, cards that wait, dollars, the price at which two ways
cost the same. Nothing here knows of stages or models."""

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from launch.hardware import Device
from launch.ledger import wasted_shares

DEVICES_PER_NODE = 8


def compute_seconds(flops: float, device: Device, precision: str, *, devices: int = 1, utilization: float) -> float:
    """Seconds that `devices` need for `flops` at a share `utilization` (0 to 1) of their dense peak."""
    return flops / (devices * device.peak(precision) * utilization)


def communication_seconds(
    parameter_bytes: float,
    gradient_bytes: float,
    device: Device,
    *,
    devices: int,
    zero_stage: int | None,
    accumulation: int = 1,
) -> float:
    """Seconds that an optimizer step spends on the links of data-parallel training, at full bandwidth.

    Bytes received a device, with all collectives as rings (ZeRO, arXiv 1910.02054, section 7): the gradients are
    reduced and what comes of them gathered, 2 (D-1)/D of their bytes a step (stages 2 and 3 reduce in each of
    `accumulation` micro-batches); stage 3 gathers the weights in every forward and every backward pass instead,
    2 (D-1)/D of theirs. More than DEVICES_PER_NODE devices share their nodes' networks. 0 where the device's
    links are not known.
    """
    bandwidth = device.link_gb_s if devices <= DEVICES_PER_NODE else device.network_gb_s
    if devices == 1 or bandwidth is None:
        return 0.0
    share = (devices - 1) / devices
    if zero_stage == 3:
        volume = accumulation * (2 * parameter_bytes + gradient_bytes)
    else:
        volume = gradient_bytes * (1 + (accumulation if zero_stage == 2 else 1))
    return share * volume / (bandwidth * 1e9)


def makespan(durations: Sequence[float], cards: int) -> float:
    """Wall time of independent jobs, in order, each on the first of `cards` that is free."""
    if cards < 1:
        raise ValueError(f"cards is {cards}: at least 1 is needed")
    free = [0.0] * min(cards, max(1, len(durations)))
    for duration in durations:
        heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


def cards_held(durations: Sequence[float], cards: int) -> float:
    """Card-time that is paid for independent jobs: the cards are held until the last job is in.

    With a card for each of E jobs this is MoE-DisCo's E * max_k(t_k) (arXiv 2601.06857), with one card their sum.
    """
    return min(cards, len(durations)) * makespan(durations, cards)


def disco_dollars(
    longest: float, tuning: float, *, experts: int, train_price: float, tune_price: float
) -> tuple[float, float]:
    """Dollars of the submodels and of fine-tuning as MoE-DisCo's cost table counts them: E * max_k(t_k) * p_train
    and t_F * p_finetune; hours and dollars an hour."""
    return cards_held([longest] * experts, experts) * train_price, tuning * tune_price


def break_even(other: float, big: float, cheap: float) -> float | None:
    """The price of a cheap device-hour, as a share of a big one's, at which `big` and `cheap` device-hours
    together cost what `other` big device-hours do. None where no price does: `big` alone takes longer, or there
    is no cheap time."""
    if cheap <= 0 or other <= big:
        return None
    return (other - big) / cheap


def transfer_seconds(size: float, gbit_s: float) -> float:
    """Seconds for `size` bytes over a connection of `gbit_s` Gb/s."""
    if not gbit_s > 0:
        raise ValueError(f"bandwidth is {gbit_s} Gb/s: it must be above 0")
    return size * 8 / (gbit_s * 1e9)


def measured_utilization(rows: Iterable[dict[str, Any]], device: Device) -> float | None:
    """Share of the dense peak that training reached on `device`, from ledger rows that ran on it.

    Start-up and what was wasted are left out; saving and validation are in. None without such rows.
    """
    rows = list(rows)
    flops = possible = 0.0
    for row, wasted in zip(rows, wasted_shares(rows), strict=True):
        ran = row.get("ran_on") == device.name and row.get("flops") and row.get("precision")
        if ran and row["status"] != "startup" and wasted == 0:
            flops += row["flops"]
            possible += row["seconds"] * row["devices"] * device.peak(row["precision"])
    return flops / possible if possible else None
