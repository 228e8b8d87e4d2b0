"""A run with the planner that plans: what it logs, what it records, and that the simulator reads it."""

import json

import numpy as np
import pytest
import torch.distributed as dist

import fsep
from fsep import costs
from fsep.sharding import sharded_layers
from tests.bcd.ranks import run_ranks
from tests.disco.tiny_models import tiny_model
from tests.fsep.sharded import EXPERTS, compare_training, sequences, start_engine, train
from tests.fsep.test_cli import run

STEPS = 4


def planned_run(folder):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {"exact": compare_training("mixtral", 10, 1, planner=planner(2, ranks))}
    model = tiny_model("qwen3_moe", experts=EXPERTS, num_hidden_layers=3).train()
    topology = fsep.Topology(ranks, devices_per_node=1)
    fsep.attach(model, slots=EXPERTS, topology=topology)
    runtime = sharded_layers(model)[0].runtime
    found["before"] = fsep.stats(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = start_engine(model, 2)
    logs, loads = [], []
    with fsep.TraceRecorder(model) as recorder:
        for step in range(STEPS):
            train(engine, 1, first=step)
            if runtime.planner._pending is not None:
                runtime.planner._pending.result()
            recorder.end_microbatch()
            recorder.end_step(step)
            logs.append(fsep.stats(engine))
            loads.append(np.stack([runtime.records[index].load_NE for index in range(2)]))
            for entry, record in zip(logs[-1], runtime.records.values(), strict=True):
                tokens_NEN = fsep.route(record.load_NE, record.layout, topology)
                price = costs.cost(tokens_NEN, topology)
                entry["wanted"] = (price.imbalance, price.inter_node_fraction)
    trace = recorder.trace()
    if rank == 0:
        trace.save(f"{folder}/run.npz")
    found |= {"logs": logs, "loads": np.stack(loads), "trace": trace.tokens, "layers": trace.layer.tolist()}
    found["counts"] = [len(sequences(100 * step, ranks)[0]) for step in range(STEPS)]
    runtime.planner.close()
    return found


def planner(layers, ranks):
    return fsep.Planner(fsep.Topology(ranks), EXPERTS, layers=layers, experts=EXPERTS, background=False)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("monitor")
    return folder, run_ranks(planned_run, 2, str(folder), folder=folder)


def test_a_planned_run_equals_the_dense_model(two):
    for found in two[1]:
        assert max(found["exact"].values()) < 1e-4


def test_stats_are_the_cost_models_and_equal_on_all_ranks(two):
    first, second = (found["logs"] for found in two[1])
    assert two[1][0]["before"] == []
    for log, other in zip(first, second, strict=True):
        assert [entry["layer"] for entry in log] == [1, 2]
        for entry, same in zip(log, other, strict=True):
            assert (entry["imbalance"], entry["inter_node_fraction"]) == pytest.approx(entry["wanted"])
            assert [entry[key] for key in ("load", "imbalance")] == [same[key] for key in ("load", "imbalance")]
            assert entry["expert_imbalance"] == pytest.approx(max(entry["load"]) / np.mean(entry["load"]))
            assert entry["route_ms"] > 0
    assert first[-1][0]["plan_ms"] > 0
    assert json.dumps(first)


def test_recorded_trace_is_the_load_and_is_simulated(two):
    folder, ranks = two
    for found in ranks:
        assert found["trace"].shape == (STEPS, 2, 1, 2, EXPERTS)
        assert (found["trace"][:, :, 0] == found["loads"]).all()
        assert found["layers"] == [1, 2]
    arguments = ["simulate", str(folder / "run.npz"), "--slots", "5", "--devices-per-node", "1"]
    assert run(*arguments, "--planner", "fsep,static", "--stale", "0", "--json", str(folder / "out.json")) == 0
    assert json.loads((folder / "out.json").read_text())
