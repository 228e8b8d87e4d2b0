import gc
import json
import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

import bcd
from bcd.blocks import partition
from bcd.cli import main
from bcd.config import read
from bcd.memory import Predictor, gpu_gb, memory, plan, shape, state_bytes
from bcd.rows import select
from bcd.trace import AllocationTracker, fake_model, peak
from tests.bcd.models import VOCABULARY, build, llama_config, moe_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [llama_config(), moe_config(), llama_config(tied=True)], ids=["llama", "moe", "tied"]
)
def test_trace_equals_a_real_step_byte_for_byte(config, dtype):
    model, (shapes, fake) = build(config, dtype=dtype), fake_model(config, dtype)
    for block in partition(model, max_block_gb=8e-5).blocks:
        predicted = peak(shapes, fake, block.pieces, micro_batch=2, sequence=17)
        parameters, rows = select(model, block.pieces)
        for item in rows:
            item.attach()
        tracker = AllocationTracker(VOCABULARY, 34)
        with tracker:
            tokens = torch.randint(0, VOCABULARY, (2, 17))
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            del loss, tokens
        for item in rows:
            item.detach()
        assert all(p.grad is not None for p in parameters)
        for p in [*model.parameters(), *parameters]:
            p.grad = None
        assert predicted.total == tracker.peak
        gc.collect()


def step(engine):
    """Bytes beyond the weights at the peak of one update."""
    state = sum(t.nbytes for s in engine.optimizer.state.values() for t in s.values())
    state += sum(m.nbytes for m in sum(engine._backend.masters, []) if not isinstance(m, torch.nn.Parameter))
    if engine._expansion is not None:
        state += sum(t.nbytes for tensors in engine._expansion.state.values() for t in tensors)
    highest = 0
    for _ in range(engine.gradient_accumulation_steps()):
        gradients = sum(p.grad.nbytes for p in engine._backend.parameters if p.grad is not None)
        with AllocationTracker() as tracker:
            tokens = torch.randint(0, VOCABULARY, (2, 24))
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            del loss, tokens
            engine.step()
        highest = max(highest, state + gradients + tracker.peak)
    return highest


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(granularity="module", activation_checkpointing=True),
        dict(max_block_gb=1e-4, always_on=["*norm*"], gradient_accumulation_steps=2),
        dict(granularity={"all": ["*"]}),
        dict(order="ends", expansion={}),
        dict(order="ends", expansion={"active": "factored"}, always_on=["model.norm"]),
    ],
    ids=["layer", "module", "rows", "all", "ends", "factored"],
)
def test_predicted_peak_is_the_measured_one(options, dtype):
    config = llama_config(width=64)
    predicted = memory(config, config=options, dtype=dtype, sequence=24, micro_batch=2, fused=False)
    engine = bcd.initialize(model=build(config), config=dict(options, dtype=dtype, steps_per_block=9))
    highest = 0
    for _ in engine.partition.blocks:
        step(engine)  # makes the moments, which count as state
        highest = max(highest, step(engine))
        engine.switch()
    weights = sum(p.nbytes for p in engine.module.parameters())
    assert predicted.total == pytest.approx(weights + highest, rel=0.1)


def test_logits_are_known_by_their_shape():
    shapes, fake = fake_model(llama_config(), torch.float32)
    found = peak(shapes, fake, partition(shapes).blocks[0].pieces, micro_batch=2, sequence=17)
    # Logits, their log-softmax and its gradient in fp32.
    assert found.logits == 3 * 2 * 17 * VOCABULARY * 4


@pytest.mark.parametrize(("dtype", "item", "master"), [("fp32", 4, 0), ("bf16", 2, 4)])
def test_state_bytes_closed_form(dtype, item, master):
    groups = [[10, 5], [7]]
    assert state_bytes(groups, dtype=dtype) == (22 * item, 22 * (8 + master) + 3 * 4)
    # Flattened groups of 15 and 7 are padded to 16 and 8 for two ranks.
    assert state_bytes(groups, dtype=dtype, devices=2, zero_stage=2) == (12 * item, 12 * 12 + 2 * 4)
    assert state_bytes(groups, dtype=dtype, devices=2, zero_stage=1)[0] == 22 * item
    # ZeRO-3 cuts each parameter: 5 + 3 + 4 elements.
    assert state_bytes(groups, dtype=dtype, devices=2, zero_stage=3) == (12 * item, 12 * 12 + 2 * 4)


def test_llama_2_7b_on_24_gb():
    config = shape("llama-2-7b")
    count = 6_738_415_616  # parameters of Llama-2-7B
    adamw = memory(config, method="adamw", sequence=128)
    assert adamw.parameters == 2 * count and adamw.gradients == 2 * count
    assert adamw.optimizer == 12 * count + 4 * 291 and not adamw.fits(80)
    bcd = memory(config, sequence=1024)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert bcd.gradients == 2 * layer and bcd.optimizer == 12 * layer + 4 * 9 and bcd.fits(24)
    assert bcd.host == 12 * count  # moments and residual of the weights, kept for every block


def test_llama_3_8b_needs_its_head_cut():
    config = shape("llama-3-8b")
    config.num_hidden_layers = 2
    whole = memory(config, sequence=128)
    cut = memory(config, sequence=128, config=dict(max_block_gb=3.1))
    assert whole.block == "embeddings" or whole.block == "head"
    assert whole.gradients + whole.optimizer > 14 * 128256 * 4096
    assert cut.gradients + cut.optimizer <= 3.1e9 + 4 * 100 and cut.total < whole.total


def test_options_move_what_they_should():
    config = llama_config()
    base = memory(config, sequence=32)
    assert memory(config, sequence=32, config=dict(state="reset")).host < base.host
    assert memory(config, sequence=32, config=dict(always_on=["lm_head"])).optimizer > base.optimizer
    assert memory(config, sequence=32, config=dict(active_blocks=2)).optimizer > base.optimizer
    assert memory(config, sequence=32, config=dict(granularity="module")).optimizer < base.optimizer
    assert memory(config, sequence=32, config=dict(activation_checkpointing=True)).activations < base.activations
    assert memory(config, sequence=32, fused=False).buffers > base.buffers
    four = memory(config, method="adamw", sequence=32, devices=4, zero_stage=3)
    one = memory(config, method="adamw", sequence=32, devices=1, zero_stage=3)
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=0.01)
    offloaded = memory(config, method="adamw", sequence=32, devices=2, zero_stage=2, offload=True)
    assert offloaded.optimizer == 0 < offloaded.host
    kept = memory(config, sequence=32, config=dict(gradient_accumulation_steps=2))
    assert kept.total >= base.total


def test_a_model_keeps_its_frozen_parameters_frozen():
    model = build(llama_config())
    model.model.layers.requires_grad_(False)
    assert memory(model, dtype="fp32", sequence=16).gradients == 4 * 32 * VOCABULARY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(method="sgd"), "method is 'sgd'"),
        (dict(dtype="fp8"), "dtype is 'fp8'"),
        (dict(zero_stage=4), "zero_stage is 4"),
        (dict(devices=2), "devices is 2"),
        (dict(devices=0, zero_stage=1), "devices is 0"),
        (dict(offload=True), "offload needs"),
        (dict(micro_batch=0), "micro_batch is 0"),
        (dict(sequence=1), "sequence is 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        memory(llama_config(), **arguments)


def test_gpu_gb():
    assert gpu_gb("rtx4090") == gpu_gb("RTX4090") == gpu_gb("24") == 24.0
    for bad in ("rtx", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="gpu"):
            gpu_gb(bad)


def test_plan_finds_the_largest_micro_batch():
    config = llama_config()
    gb = 2e-3
    rows = plan(config, gb, sequence=32, devices=(1, 2))
    assert [e.method for e, _ in rows][:3] == ["AdamW", "AdamW ZeRO-1", "AdamW ZeRO-1 offload"]
    assert any(fits and e.micro_batch > 1 for e, fits in rows)
    for estimate, fits in rows:
        assert estimate.fits(gb) is fits
        if fits and estimate.method == "BCD layer":
            more = memory(config, sequence=32, micro_batch=estimate.micro_batch + 1)
            assert not more.fits(gb)
    assert not any(fits for _, fits in plan(config, 1e-4, sequence=32, devices=(1,)))


def run(capsys, *arguments):
    sys_argv, sys.argv = sys.argv, ["bcd", *arguments]
    try:
        with pytest.raises(SystemExit) as stop:
            main()
    finally:
        sys.argv = sys_argv
    return stop.value.code or 0, *capsys.readouterr()


def test_command_line(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    code, out, _ = run(capsys, "plan", str(tmp_path), "--gpu", "0.002", "--sequence", "32", "--json")
    rows = json.loads(out)
    assert code == 0 and {"method", "total", "fits"} <= rows[0].keys()
    code, out, _ = run(capsys, "plan", str(tmp_path), "--gpu", "rtx4090", "--sequence", "32")
    assert code == 0 and "BCD layer" in out
    code, _, err = run(capsys, "plan", str(tmp_path), "--gpu", "rtx409")
    assert code == 2 and err.startswith("error: gpu is 'rtx409'") and err.count("\n") == 1
    code, _, err = run(capsys, "plan", str(tmp_path / "nothing"))
    assert code == 2 and "llama-2-7b" in err


def test_shapes_by_name():
    assert shape("qwen1.5-moe-a2.7b").num_experts == 60
    assert AutoConfig.for_model("llama").vocab_size == 32000


def test_import_needs_no_deepspeed():
    code = "import sys, bcd; sys.exit('deepspeed' in sys.modules or 'typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_math_of_tracker_on_plain_tensors():
    with AllocationTracker() as tracker:
        a = torch.zeros(8)
        b = a + 1
        del b
        c = a.view(2, 4)
    assert tracker.total == 32 and tracker.peak == 64 and math.prod(c.shape) == 8


@pytest.mark.parametrize("method, stage", [("adamw", 0), ("adamw", 3), ("bcd", None)])
def test_shallow_models_stand_for_deep_ones(method, stage):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 128}
    deep = AutoConfig.for_model("llama", num_hidden_layers=9, **sizes)
    whole, quick = (Predictor(deep, "bf16", 32, depths=depths) for depths in (None, (2, 4)))
    for micro_batch in (1, 3):
        settings = {"zero_stage": stage, "micro_batch": micro_batch}
        exact, found = (each.estimate(method, read({}), **settings) for each in (whole, quick))
        assert found.total == pytest.approx(exact.total, rel=0.02)
        assert found.activations == pytest.approx(exact.activations, rel=0.02)
        assert (found.parameters, found.optimizer) == (exact.parameters, exact.optimizer)


def test_a_loss_of_the_scripts_own_is_traced():
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=4096
    )

    def without_head(model, tokens):
        return model.model(input_ids=tokens, use_cache=False)[0].sum()

    own, given = (Predictor(config, "fp32", 64, loss).estimate("adamw", read({})) for loss in (None, without_head))
    assert given.logits == 0 < own.logits
