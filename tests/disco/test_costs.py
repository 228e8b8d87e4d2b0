import pytest

from disco.costs import Bill, place


def row(phase, seconds, *, attempt=1, status="done", step=10, price=0.36, devices=1, kind="simulated"):
    return {
        "phase": phase,
        "stage": phase.rpartition("/")[0] or phase,
        "submodel": None,
        "attempt": attempt,
        "status": status,
        "step": step,
        "devices": devices,
        "seconds": seconds,
        "dollars": seconds * devices * price / 3600,
        "priced_as": "rtx4090",
        "price_per_hour": price,
        "price_source": "paper",
        "price_as_of": "2026-01",
        "kind": kind,
        "tokens": 100 * (status != "startup"),
        "flops": 1000,
    }


@pytest.mark.parametrize(
    "phase, where",
    [
        ("start", ("DisCo", "seed")),
        ("train/3", ("DisCo", "submodels")),
        ("finetune_router", ("DisCo", "router")),
        ("finetune", ("DisCo", "fine-tuning")),
        ("baselines/joint", ("joint", "joint training")),
        ("baselines/random_split/train/0", ("random split", "submodels")),
        ("baselines/random_split/finetune", ("random split", "fine-tuning")),
        ("evaluate", ("DisCo", "evaluate")),
    ],
)
def test_every_phase_has_its_place(phase, where):
    assert place(row(phase, 1.0)) == where


def test_pipelines_add_up_and_the_random_split_shares_the_seed():
    rows = [row("start", 100), row("train/0", 50), row("train/1", 60, devices=2), row("finetune", 10, price=3.6)]
    rows += [row("baselines/random_split/train/0", 40), row("baselines/joint", 500, price=3.6)]
    bill = Bill(rows)
    assert list(bill.parts("DisCo")) == ["seed", "submodels", "fine-tuning"]
    disco = bill.pipeline("DisCo")
    assert disco.seconds == 100 + 50 + 120 + 10
    assert disco.dollars == pytest.approx((270 * 0.36 + 10 * 3.6) / 3600)
    assert bill.pipeline("random split").seconds == 140 and list(bill.parts("random split"))[0] == "seed"
    assert bill.pipeline("joint").dollars == pytest.approx(0.5)
    assert bill.sums["DisCo", "submodels"].makespan_seconds == 60
    assert bill.simulated and not Bill([row("start", 1, kind="measured")]).simulated


def test_waste_and_start_up_stand_apart():
    rows = [
        row("train/0", 5, status="startup", step=0),
        row("train/0", 20, status="held", step=10),
        row("train/0", 7, attempt=2, status="startup", step=5),
        row("train/0", 30, attempt=2, step=20),
    ]
    cost = Bill(rows).pipeline("DisCo")
    assert cost.seconds == 5 + 10 + 30 and cost.startup == 5
    assert cost.wasted_seconds == 10 + 7 and (cost.tokens, cost.flops) == (150, 2500)
    again = Bill([row("start", 3, status="killed"), row("baselines/random_split/train/0", 5)])
    assert again.pipeline("random split").wasted_seconds == 0 and again.pipeline("DisCo").wasted_seconds == 3
    assert cost.dollars + cost.wasted_dollars == pytest.approx(62 * 0.36 / 3600)


def test_an_empty_ledger():
    bill = Bill([])
    assert bill.pipeline("DisCo") is None and bill.pipeline("random split") is None and bill.prices() == {}
    assert not bill.simulated


def test_prices_name_their_source_and_date():
    bill = Bill([row("start", 1)])
    assert bill.prices() == {"rtx4090": "$0.36/h (paper, 2026-01)"}
    assert bill.priced_as(("DisCo", "seed")) == "rtx4090"
