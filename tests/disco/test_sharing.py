"""The report's section on shared experts, against figures worked out by hand."""

import json

from disco.findings import gather
from disco.page import Heading, Picture, Table, Text
from disco.report import blocks
from disco.sharing import sharing
from tests.disco.fabricated_run import fabricate


def add(folder, *rows):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def row(step, imbalance, **more):
    share = [[0.5, 1.0, 0.25, 0.25], [0.0, 0.5, 0.5, 1.0]]
    common = {"phase": "finetune", "attempt": 1, "step": step, "steps": 8, "loss": 1.0, "tokens": 10 * step}
    common |= {"seconds": 1.0 * step, "dollars": 0.1, "flops": 5, "tokens_per_s": 10.0, "lr": 0.1}
    return common | {"imbalance": imbalance, "expert_share": share} | more


def test_a_run_without_shared_experts_has_no_such_section(tmp_path):
    config = fabricate(tmp_path)
    assert sharing(gather(config, config.folder)) == []


def test_each_layer_is_shown_with_its_means(tmp_path):
    config = fabricate(tmp_path)
    more = {"expert_imbalance": [2.0, 3.0], "inter_node_fraction": [0.25, 0.0], "route_ms": [0.1, 0.2]}
    lost = row(991, [9.0, 9.0], plan_ms=9.0, **more)  # made again below
    rows = [row(step, [1.0 + step / 1000, 1.5], plan_ms=0.5, **more) for step in (990, 991, 992)]
    add(config.folder, lost, *rows)
    heading, text, table, picture = sharing(gather(config, config.folder))
    assert heading == Heading("How processes shared the experts: finetune", 3)
    assert isinstance(text, Text) and "3 logged steps" in text.text and "0.50 ms of CPU time a layer" in text.text
    assert isinstance(table, Table) and table.rows == [
        ["0", "1: 50.0% of the tokens", "1.991", "1.992", "2.000", "25.0%", "0.100"],
        ["1", "3: 50.0% of the tokens", "1.500", "1.500", "3.000", "0.0%", "0.200"],
    ]
    assert isinstance(picture, Picture) and b"<svg" in picture.data and b"with an expert a device" in picture.data
    assert heading in blocks(gather(config, config.folder))


def test_autoep_tells_the_balance_alone(tmp_path):
    config = fabricate(tmp_path)
    add(config.folder, row(990, [1.0, 1.5]))
    _, text, table, _ = sharing(gather(config, config.folder))
    assert table.columns == ["MoE layer", "busiest expert", "imbalance, mean", "worst"]
    assert "ms of CPU" not in text.text
