"""The training loop: against plain PyTorch, across accumulation and processes, and through a kill."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bcd
from disco.artifacts import SCRATCH, write_json
from disco.checkpoint import Checkpoint
from disco.config import Optimizer
from disco.job import Job, JobError, run_job
from disco.split import split
from disco.trainer import learning_rate
from launch.flops import training_flops
from launch.ledger import read
from tests.disco import tiny_models
from tests.disco.conftest import stop_at_checkpoint

NEW_FAMILIES = ["qwen3_moe", "flex_olmo", "gpt_oss", "deepseek_v2", "deepseek_v3"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_close(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(
            got[name], expected[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def test_learning_rate_follows_the_closed_forms():
    section = Optimizer(learning_rate=2.0, warmup=0.1, min_learning_rate=0.1, schedule="cosine")
    rates = [learning_rate(step, 100, section) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert rates[55] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 45 / 90))))
    linear = section.model_copy(update={"schedule": "linear"})
    assert learning_rate(55, 100, linear) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    constant = section.model_copy(update={"schedule": "constant"})
    assert learning_rate(99, 100, constant) == 2.0


def test_the_loop_is_plain_pytorch(make_job, toy_rows, tiny_model):
    """Three steps equal those of AdamW on Hugging Face's own loss, clipping and decay groups included."""
    rows = toy_rows()
    job, out = make_job("ours", rows=rows, aux=0.0, schedule="constant", warmup=0.0, clip=0.5)
    run_job(job, threads=1)
    model = tiny_model().train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    losses = []
    for step in range(3):
        batch = rows.batch(range(4 * step, 4 * step + 4))
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        losses.append(float(loss.detach()))
    tiny = {"rtol": 1e-3, "atol": 1e-4}  # Adam divides by gradients near zero
    model.save_pretrained(out.parent / "theirs")
    assert_close(weights(out), weights(out.parent / "theirs"), **tiny)
    logged = [row["loss"] for row in read(Path(job.run) / "metrics.jsonl")]
    assert logged == pytest.approx(losses, rel=1e-4)


def test_accumulation_and_processes_change_nothing(make_job, toy_rows):
    """The last batch is short, documents are of uneven length, and the auxiliary loss is on."""
    rows = toy_rows(10)
    whole, reference = make_job("whole", rows=rows, aux=0.5)
    run_job(whole, threads=1)
    cut, accumulated = make_job("cut", rows=rows, aux=0.5, micro_batch_size=1)
    run_job(cut, threads=1)
    spread, parallel = make_job("spread", rows=rows, aux=0.5, processes=2)
    run_job(spread, threads=1)
    tiny = {"rtol": 1e-3, "atol": 1e-4}
    assert_close(weights(accumulated), weights(reference), **tiny)
    assert_close(weights(parallel), weights(reference), **tiny)
    logs = {phase: [] for phase in ("whole", "cut", "spread")}
    for row in read(Path(whole.run) / "metrics.jsonl"):
        logs[row["phase"]].append(row)
    for phase in ("cut", "spread"):
        for key in ("loss", "balance", "tokens", "flops"):
            assert [row[key] for row in logs[phase]] == pytest.approx([row[key] for row in logs["whole"]], rel=1e-4)
        assert logs[phase][-1]["validation_loss"] == pytest.approx(logs["whole"][-1]["validation_loss"], rel=1e-4)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_zero_stages_agree(make_job, toy_rows, stage):
    rows = toy_rows(8)
    plain, reference = make_job("stage0", rows=rows)
    run_job(plain, threads=1)
    sharded, out = make_job(f"stage{stage}", rows=rows, zero_stage=stage, processes=2)
    run_job(sharded, threads=1)
    assert_close(weights(out), weights(reference), rtol=1e-3, atol=1e-4)


def test_bf16_keeps_fp32_master_weights(make_job, toy_rows):
    job, out = make_job("bf16", rows=toy_rows(8), precision="bf16", zero_stage=1, learning_rate=1e-5)
    run_job(job, threads=1)
    start, end = weights(out.parent / "start"), weights(out)
    assert any(not torch.equal(start[name].bfloat16(), end[name].bfloat16()) for name in start)


@pytest.mark.parametrize("name", NEW_FAMILIES)
def test_a_submodel_of_every_family_trains(tmp_path, make_job, name):
    model = tiny_models.tiny_model(name, 3, torch.bfloat16, vocab_size=96)
    tiny_models.save(model, tmp_path / "full")
    split(tmp_path / "full", 1, tmp_path / "start")
    job, out = make_job(name)
    run_job(job.model_copy(update={"dtype": "bfloat16"}), threads=1)
    before, after = Checkpoint.open(tmp_path / "start"), Checkpoint.open(out)
    assert after.tensors.keys() == before.tensors.keys()
    for key, stored in after.tensors.items():
        assert stored.dtype == before.tensors[key].dtype, key
        if (role := before.family.role(key)).kind == "expert" and role.expert == 0:
            assert not torch.equal(stored.read(), before.tensors[key].read()), key
    assert all("expert_share" not in row for row in read(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.parametrize(("trainable", "moves"), [("experts", ".experts."), ("router", "mlp.gate.")])
def test_frozen_parts_stay_bit_for_bit(make_job, toy_rows, trainable, moves):
    job, out = make_job("frozen", rows=toy_rows(8), trainable=trainable)
    run_job(job, threads=1)
    start, end = weights(out.parent / "start"), weights(out)
    for name in start:
        assert torch.equal(start[name], end[name]) == (moves not in name), name


def test_a_killed_run_resumes_bit_for_bit(make_job, toy_rows):
    """SIGKILL after a checkpoint, then again: the same weights as an undisturbed run, and the bill of both."""
    rows = toy_rows(160)
    settings = {"batch_size": 2, "checkpoint_every": 5}
    whole, reference = make_job("whole", rows=rows, **settings)
    run_job(whole, threads=1)
    killed, out = make_job("killed", rows=rows, **settings)
    write_json(out / SCRATCH / "job.json", killed.model_dump(mode="json"))
    process = subprocess.Popen([sys.executable, "-m", "disco.job", str(out / SCRATCH / "job.json")], env=os.environ)
    checkpoints = out / SCRATCH / "checkpoints"
    for _ in range(3000):
        if any("partial" not in path.name for path in checkpoints.glob("step-*")):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "model.safetensors").exists()
    run_job(killed, threads=1)
    got, expected = weights(out), weights(reference)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    steps = [row["step"] for row in read(Path(killed.run) / "metrics.jsonl") if row["phase"] == "killed"]
    assert steps[-1] == 80
    attempts = {row["attempt"] for row in read(Path(killed.run) / "ledger.jsonl") if row["phase"] == "killed"}
    assert attempts == {1, 2}


def test_a_sharded_run_resumes_bit_for_bit(make_job, toy_rows):
    """ZeRO-2 with two processes: stopped by a checkpoint that cannot be written, then continued."""
    settings = {"batch_size": 4, "checkpoint_every": 2, "zero_stage": 2, "processes": 2}
    rows = toy_rows(24)
    whole, reference = make_job("whole", rows=rows, **settings)
    run_job(whole, threads=1)
    stopped, out = make_job("stopped", rows=rows, **settings)
    stop_at_checkpoint(stopped, out, 4)
    run_job(stopped, threads=1)
    got, expected = weights(out), weights(reference)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, precision, trainable, processes",
    [
        (0, "fp32", "all", (1, 2)),
        (1, "fp32", "experts", (2, 1)),
        (2, "fp32", "all", (2, 3)),
        (2, "bf16", "all", (2, 1)),
        (0, "bf16", "all", (2, 1)),
    ],
)
def test_a_run_goes_on_with_other_processes(make_job, toy_rows, stage, precision, trainable, processes):
    """The state is exact, so that what follows differs only by the order in which gradients are summed."""
    settings = {"batch_size": 6, "micro_batch_size": 1, "checkpoint_every": 2, "zero_stage": stage}
    settings |= {"precision": precision}
    rows, (before, after) = toy_rows(36), processes
    whole, reference = make_job("whole", rows=rows, trainable=trainable, processes=before, **settings)
    run_job(whole, threads=1)
    stopped, out = make_job("stopped", rows=rows, trainable=trainable, processes=before, **settings)
    stop_at_checkpoint(stopped, out, 4)
    section = stopped.section.model_copy(update={"processes": after})
    run_job(stopped.model_copy(update={"section": section}), threads=1)
    got, expected = weights(out), weights(reference)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-2}
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], **tolerance)
    assert [row["step"] for row in logged(stopped, "stopped")][-1] == 6


def logged(job: Job, phase: str) -> list[dict]:
    return [row for row in read(Path(job.run) / "metrics.jsonl") if row["phase"] == phase]


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_block_of_everything_is_adamw_bit_for_bit(make_job, toy_rows, stage):
    """Accumulation, clipping, decay groups, schedule, balancing loss and the bill of operations included."""
    settings = {"rows": toy_rows(24), "micro_batch_size": 2, "clip": 0.5, "zero_stage": stage}
    whole, reference = make_job("adamw", **settings)
    run_job(whole, threads=1)
    blocks, out = make_job("bcd", blocks={"granularity": {"all": ["*"]}, "steps_per_block": 2}, **settings)
    run_job(blocks, threads=1)
    got, expected = weights(out), weights(reference)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    for key in ("loss", "lr", "tokens", "flops", "balance", "validation_loss"):
        mine, theirs = ([row.get(key) for row in logged(whole, phase)] for phase in ("bcd", "adamw"))
        assert mine == theirs, key


def test_a_run_killed_in_the_middle_of_a_block_resumes_bit_for_bit(make_job, toy_rows, tiny_model):
    """And every parameter has trained, and each update is billed by the blocks that trained in it."""
    rows = toy_rows(60)
    settings = {"batch_size": 2, "checkpoint_every": 4, "activation_checkpointing": True}
    blocks = {"steps_per_block": 3, "order": "shuffled", "active_blocks": 2}
    whole, reference = make_job("whole", rows=rows, blocks=blocks, **settings)
    run_job(whole, threads=1)
    killed, out = make_job("killed", rows=rows, blocks=blocks, **settings)
    write_json(out / SCRATCH / "job.json", killed.model_dump(mode="json"))
    process = subprocess.Popen([sys.executable, "-m", "disco.job", str(out / SCRATCH / "job.json")], env=os.environ)
    checkpoints = out / SCRATCH / "checkpoints"
    for _ in range(6000):
        if any("partial" not in path.name for path in checkpoints.glob("step-*")):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "model.safetensors").exists()
    run_job(killed, threads=1)
    got, expected, start = weights(out), weights(reference), weights(out.parent / "start")
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not any(torch.equal(expected[name], start[name]) for name in start)

    model = tiny_model()
    cut = bcd.partition(model)
    schedule = bcd.BlockSchedule(len(cut.blocks), "shuffled", 3, active=2, seed=7)
    operations, labels = 0, rows.labels()
    for step, row in enumerate(logged(whole, "whole")):
        names = {piece.name for index in schedule.blocks for piece in cut.blocks[index].pieces}
        for tokens in labels[2 * step : 2 * step + 2]:
            operations += training_flops(
                model.config, 16, labels=int(tokens), trainable=names, activation_checkpointing=True
            )
        assert row["flops"] == operations, step
        schedule.record(1.0)
        if schedule.done:
            schedule.advance()
    assert schedule.cycle == 3  # 6 blocks, 2 at once: 9 updates a cycle, 30 updates


@pytest.mark.parametrize("active", ["adamw", "factored"])
def test_the_expansion_trains_the_layers_and_is_billed(make_job, toy_rows, tiny_model, active):
    """One visit of three reaches the embeddings; the layers have gradients in the last micro-batch alone."""
    rows = toy_rows(20)
    expansion = {"active": active}
    blocks = {"order": "ends", "expansion": expansion, "steps_per_block": 1, "always_on": ["model.norm"]}
    job, out = make_job("expansion", rows=rows, blocks=blocks, micro_batch_size=1, zero_stage=2)
    run_job(job, threads=1)
    end, start = weights(out), weights(out.parent / "start")
    assert not any(torch.equal(end[name], start[name]) for name in start)
    config, everything = tiny_model().config, [name for name, _ in tiny_model().named_parameters()]
    ends = {"low": "model.embed_tokens.weight", "high": "lm_head.weight"}
    operations, labels = 0, rows.labels()
    visits = ["low", "high", "high", "low", "high"]
    for step, row in enumerate(logged(job, "expansion")):
        batch = [int(tokens) for tokens in labels[4 * step : 4 * step + 4]]
        for index, tokens in enumerate(batch):
            reached = {ends[visits[step]], "model.norm.weight"}
            if index < 3 and active == "factored":
                reached = {"model.norm.weight"}
            elif index == 3 and visits[step] == "low":
                reached = everything
            operations += training_flops(config, 16, labels=tokens, trainable=reached)
        assert row["flops"] == operations, step


@pytest.mark.parametrize(
    ("stage", "precision"),
    [pytest.param(1, "fp32", marks=pytest.mark.slow), (3, "fp32"), pytest.param(2, "bf16", marks=pytest.mark.slow)],
)
def test_blocks_under_zero_with_two_processes(make_job, toy_rows, stage, precision):
    """Experts in groups of rows, norms always on; a sharded run ends where one process without sharding does."""
    blocks = {"steps_per_block": 1, "expert_groups": 2, "always_on": ["*norm*"], "granularity": "module"}
    settings = {"rows": toy_rows(48), "blocks": blocks, "precision": precision}
    plain, reference = make_job("plain", **settings)
    run_job(plain, threads=1)
    sharded, out = make_job("sharded", zero_stage=stage, processes=2, **settings)
    run_job(sharded, threads=1)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if precision == "fp32" else {"rtol": 0.05, "atol": 0.02}
    assert_close(weights(out), weights(reference), **tolerance)
    assert [row["flops"] for row in logged(plain, "plain")] == [row["flops"] for row in logged(plain, "sharded")]


def test_a_loss_that_is_not_finite_stops_the_run(make_job, tiny_model, capfd):
    model = tiny_model()
    model.model.norm.weight.data[3] = float("nan")
    job, out = make_job("bad", model=model)
    with pytest.raises(JobError, match="bad"):
        run_job(job, threads=1)
    assert "the loss of step 0 is nan: lower finetune.learning_rate" in capfd.readouterr().err
    assert not (out / "model.safetensors").exists()


def test_collapsed_routing_stops_the_run(make_job, tiny_model, toy_rows, capfd):
    job, out = make_job("collapsed", rows=toy_rows(40))
    job = job.model_copy(update={"collapse_share": 0.51, "collapse_logs": 3})  # top-2 of 4: 0.5 is balanced
    with pytest.raises(JobError):
        run_job(job, threads=1)
    error = capfd.readouterr().err
    assert "routing has collapsed: one expert held over 51% of a layer's tokens in 3 logs" in error
    assert not (out / "model.safetensors").exists()


def test_missing_weights_are_refused(make_job, capfd):
    job, _ = make_job("wrong")
    path = Path(job.model) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(JobError):
        run_job(job, threads=1)
    assert "missing keys: model.norm.weight" in capfd.readouterr().err


BOTH = ["bash", "-c", '"$@" & first=$!; "$@" & second=$!; wait $first && wait $second', "both"]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_two_machines_of_two_ranks_are_one_of_four(make_job, toy_rows, zero_stage):
    """Two torchrun agents that meet at a port, as on two machines, train what one agent of four ranks does."""
    rows = toy_rows(20)
    section = {"rows": rows, "processes": 4, "zero_stage": zero_stage, "checkpoint_every": 2}
    one, reference = make_job("one", **section)
    run_job(one, threads=1)
    two, spread = make_job("two", **section)
    run_job(two.model_copy(update={"nodes": 2, "node_command": BOTH}), threads=1)
    assert_close(weights(spread), weights(reference), rtol=1e-5, atol=1e-6)
    devices = {row["phase"]: row["devices"] for row in read(Path(one.run) / "ledger.jsonl")}
    assert devices == {"one": 4, "two": 4}


def test_a_machine_that_fails_ends_the_stage_on_all(make_job):
    job, _ = make_job("lame", processes=2)
    node = ["bash", "-c", "exit 5", "node"]
    with pytest.raises(JobError, match="lame: training ended with exit code 5"):
        run_job(job.model_copy(update={"nodes": 2, "node_command": node}), threads=1)
