"""Experts divided among processes: against replicated ones, through a stop, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fsep
from disco.artifacts import SCRATCH
from disco.config import ConfigError, Experiment, ExpertSharding
from disco.experts import check_experts, slots_of, topology_of
from disco.job import JobError, run_job
from disco.stages import joint_section
from launch.ledger import read
from tests.disco.conftest import stop_at_checkpoint
from tests.disco.tiny_models import tiny_config

TINY = {"rtol": 1e-3, "atol": 1e-4}  # Adam divides by gradients near zero


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def rows_of(job, phase: str) -> list[dict]:
    return [row for row in read(Path(job.run) / "metrics.jsonl") if row["phase"] == phase]


def assert_same(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(
            got[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def assert_trained_alike(job, out, reference, other):
    assert_same(tensors(out), tensors(other), **TINY)
    mine, theirs = rows_of(job, job.phase), rows_of(reference, reference.phase)
    for key in ("loss", "balance", "tokens", "flops"):
        assert [row[key] for row in mine] == pytest.approx([row[key] for row in theirs], rel=1e-4)
    assert mine[-1]["validation_loss"] == pytest.approx(theirs[-1]["validation_loss"], rel=1e-4)


def sharded(**settings):
    return {"shared_as": "fsep", "fsep": settings, "record_loads": True}


def test_sharded_experts_train_as_replicated_ones(make_job, toy_rows):
    """Two processes, ZeRO 1, accumulation, clipping, a short last batch, the auxiliary loss and moving layouts."""
    rows = toy_rows(10)
    section = {"rows": rows, "aux": 0.5, "clip": 0.5}
    reference, expected = make_job("reference", **section)
    run_job(reference, threads=1)
    settings = {"processes": 2, "micro_batch_size": 1, "zero_stage": 1}
    job, out = make_job("sharded", **section, **settings, job_keys=sharded(slots=3, threshold=0.0))
    run_job(job, threads=1)
    assert_trained_alike(job, out, reference, expected)
    row = rows_of(job, "sharded")[-1]
    assert all(len(row[name]) == 2 for name in ("imbalance", "inter_node_fraction", "route_ms"))
    assert all(1 <= value <= 2 for value in row["imbalance"])
    trace = fsep.LoadTrace.load(out / "loads.npz")
    assert trace.tokens.shape == (3, 2, 2, 2, 4)  # steps, layers, micro-batches, processes, experts
    assert (trace.tokens[:2].sum((2, 3, 4)) == 4 * 16 * 2).all()  # rows x positions x top-k
    [result] = fsep.simulate(trace, fsep.Topology(2, 1), 3, planners=["static"])[:1]
    assert 1 <= result.imbalance <= 2


@pytest.mark.slow
@pytest.mark.parametrize("stage, checkpointing", [(0, False), (2, True)])
def test_one_process_shards_too(make_job, stage, checkpointing):
    section = {"aux": 0.1, "clip": 0.5, "activation_checkpointing": checkpointing}
    reference, expected = make_job("reference", **section)
    run_job(reference, threads=1)
    job, out = make_job("sharded", **section, zero_stage=stage, job_keys=sharded())
    run_job(job, threads=1)
    assert_trained_alike(job, out, reference, expected)
    logits = [
        AutoModelForCausalLM.from_pretrained(folder)(torch.arange(12)[None]).logits for folder in (out, expected)
    ]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("processes, again", [(2, 2), (2, 1)])
def test_a_stopped_stage_goes_on(make_job, toy_rows, processes, again):
    """With fixed layouts bit for bit at the same number of processes; at another one to rounding."""
    rows = toy_rows(20)
    section = {"rows": rows, "processes": processes, "checkpoint_every": 2, "zero_stage": 2}
    keys = sharded(planner="fixed", slots=4)
    whole, expected = make_job("whole", **section, job_keys=keys)
    run_job(whole, threads=1)
    job, out = make_job("stopped", **section, job_keys=keys)
    stop_at_checkpoint(job, out, 4)
    section = job.section.model_copy(update={"processes": again})
    run_job(job.model_copy(update={"section": section}), threads=1)
    if again == processes:
        assert_same(tensors(out), tensors(expected), rtol=0, atol=0)
        assert fsep.LoadTrace.load(out / "loads.npz").iteration.tolist() == [0, 1, 2, 3, 4]
    else:
        assert_same(tensors(out), tensors(expected), **TINY)
    steps = [row["step"] for row in rows_of(job, "stopped")]
    assert steps[-3:] == [3, 4, 5]


def experiment(**finetune) -> Experiment:
    more = {key: finetune.pop(key) for key in ("fsep", "launch", "baselines", "joint") if key in finetune}
    model = {"config": {"model_type": "qwen2_moe"}}
    corpus = {"sources": [{"name": "a", "text": ["a"]}]}
    return Experiment.parse({"name": "t", "model": model, "corpus": corpus, "finetune": finetune} | more)


@pytest.mark.parametrize(
    "family, keys, message",
    [
        (
            "qwen2_moe",
            {"optimizer": "bcd"},
            r"finetune: experts is fsep but optimizer is bcd, .*set finetune",
        ),
        ("qwen2_moe", {"router_tokens": 9}, r"router_tokens is 9, which freezes .*: set finetune.router_tokens=0"),
        ("qwen2_moe", {"zero_stage": 3}, r"zero_stage is 3, which partitions .*: set finetune.zero_stage=2"),
        ("qwen2_moe", {"precision": "bf16"}, r"clip is 1 in bf16 with zero_stage 0.* set finetune.zero_stage=1"),
        (
            "gpt_oss",
            {},
            r"the model is a gpt_oss, whose experts fsep does not know \(it knows .*: set fine",
        ),
        ("qwen2_moe", {"processes": 2, "fsep": {"slots": 1}}, r"fsep.slots is 1: 2 devices .* give at least 2"),
        ("qwen2_moe", {"fsep": {"hardware": "tpu"}}, r"fsep: hardware is 'tpu': choose one of .*h100"),
        ("qwen2_moe", {"processes": 2, "fsep": {"devices_per_node": [1, 2]}}, r"adds up to 3 but .*devices is 2"),
        ("qwen2_moe", {"baselines": ["joint"], "joint": {"optimizer": "bcd"}}, r"^joint: experts is fsep but"),
    ],
)
def test_what_cannot_work_is_refused(family, keys, message):
    config = experiment(experts="fsep", **keys)
    stages = {"finetune": config.finetune}
    if "joint" in config.baselines:
        stages["joint"] = joint_section(config)
    with pytest.raises(ConfigError, match=message):
        check_experts(config, tiny_config(family, 4), stages)


@pytest.mark.parametrize(
    "family, keys, message",
    [
        (
            "olmoe",
            {},
            r"the model is a olmoe, whose routing .* \(it is for mixtral, .*\): set finetune",
        ),
        ("mixtral", {"processes": 3, "batch_size": 3}, r"3 processes cannot have equally many of 4 experts: set"),
        ("mixtral", {"record_loads": True}, r"record_loads is true: set finetune.record_loads=false"),
        ("mixtral", {"zero_stage": 3}, r"experts is autoep but zero_stage is 3"),
        ("mixtral", {"precision": "bf16"}, r"experts is autoep and clip is 1 in bf16"),
    ],
)
def test_what_deepspeeds_expert_parallelism_cannot_do_is_refused(family, keys, message):
    config = experiment(experts="autoep", **keys)
    with pytest.raises(ConfigError, match=message):
        check_experts(config, tiny_config(family, 4), {"finetune": config.finetune})


def test_what_can_work_is_not_refused():
    for keys in ({}, {"processes": 4, "zero_stage": 2, "precision": "bf16"}, {"clip": 0, "precision": "bf16"}):
        config = experiment(experts="fsep", **keys)
        check_experts(config, tiny_config("mixtral", 4), {"finetune": config.finetune, "train": config.train})
        divided = experiment(experts="autoep", **keys)
        check_experts(divided, tiny_config("mixtral", 4), {"finetune": divided.finetune})
    assert slots_of(ExpertSharding(), 4, 8) == 4 and slots_of(ExpertSharding(), 1, 8) == 8
    assert slots_of(ExpertSharding(), 3, 4) == 4 and slots_of(ExpertSharding(slots=9), 2, 8) == 8
    shape = topology_of(ExpertSharding(hardware="h100"), tiny_config("mixtral", 4), 16, 2)
    assert (shape.devices, shape.devices_per_node, shape.inter_gbps) == (16, 8, 400.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, processes, stage", [("qwen2_moe", 2, 1), ("mixtral", 2, 0), ("qwen3_moe", 1, 2), ("qwen2_moe", 2, 2)]
)
def test_deepspeeds_expert_parallelism_trains_as_replicated_experts(
    make_job, toy_rows, tiny_model, family, processes, stage
):
    """With accumulation, clipping, a short last batch, the auxiliary loss, and a stop where ZeRO is 2."""
    section = {"rows": toy_rows(10), "aux": 0.5, "clip": 0.5, "model": tiny_model(family)}
    reference, expected = make_job("reference", **section)
    run_job(reference, threads=1)
    settings = {"processes": processes, "micro_batch_size": 1, "zero_stage": stage, "checkpoint_every": 1}
    job, out = make_job("autoep", **section, **settings, job_keys={"shared_as": "autoep"})
    run_job(job, threads=1)
    assert_trained_alike(job, out, reference, expected)
    if processes == 2:
        row = rows_of(job, "autoep")[-1]
        halves = torch.tensor(row["expert_share"]).unflatten(1, (2, 2)).sum(-1)
        assert row["imbalance"] == pytest.approx((halves.amax(1) / halves.mean(1)).tolist())
    if stage == 2:
        again, resumed = make_job("again", **section, **settings, job_keys={"shared_as": "autoep"})
        blocked = resumed / "model.safetensors"
        blocked.mkdir()
        with pytest.raises(JobError):
            run_job(again, threads=1)
        blocked.rmdir()
        assert list((resumed / SCRATCH / "checkpoints").glob("step-00000003"))
        run_job(again, threads=1)
        assert_same(tensors(resumed), tensors(out), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["autoep", "fsep"])
def test_four_processes_in_bf16(make_job, toy_rows, way):
    """Loss, balance and weights are those of replicated experts on one process, as far as 16 bits tell."""
    rows = toy_rows(24)
    section = {"rows": rows, "aux": 0.1, "clip": 0.5, "precision": "bf16", "zero_stage": 1, "batch_size": 8}
    reference, expected = make_job("reference", **section)
    run_job(reference, threads=1)
    keys = sharded(slots=2, threshold=0.0) if way == "fsep" else {"shared_as": "autoep"}
    job, out = make_job("shared", **section, processes=4, micro_batch_size=1, job_keys=keys)
    run_job(job, threads=1)
    mine, theirs = rows_of(job, "shared"), rows_of(reference, "reference")
    assert [row["tokens"] for row in mine] == [row["tokens"] for row in theirs]
    for key in ("loss", "balance", "validation_loss"):
        found, wanted = ([row[key] for row in rows if key in row] for rows in (mine, theirs))
        assert found == pytest.approx(wanted, rel=5e-3), key
    # A bias of the keys changes no attention: its gradient is noise, which Adam blows up.
    got, wanted = (
        {name: tensor for name, tensor in tensors(folder).items() if "k_proj.bias" not in name}
        for folder in (out, expected)
    )
    assert_same(got, wanted, rtol=2e-2, atol=1e-2)
    assert all(1 <= value <= 4 for value in mine[-1]["imbalance"])
