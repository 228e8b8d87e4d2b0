import gc
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import bcd
from bcd.memory import state_bytes
from tests.bcd.models import batch, build, llama_config, moe_config

EVERYTHING = {"all": ["*"]}


def start(model, **config):
    return bcd.initialize(model=model, config={"lr": 1e-2, "steps_per_block": 2, **config})


def train(engine, updates, first=0):
    """Losses of `updates` updates; micro-batches are numbered on from `first` updates."""
    gas = engine.gradient_accumulation_steps()
    losses = []
    for index in range(first * gas, (first + updates) * gas):
        loss = engine(**batch(index)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before, model):
    return {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("steps_per_block", [2, 100])
@pytest.mark.parametrize("state", ["reset", "keep"])
def test_one_block_with_everything_is_adamw_bit_for_bit(steps_per_block, state):
    reference = build(moe_config())
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for index in range(7):
        for micro in range(2):
            (reference(**batch(2 * index + micro)).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    engine = start(
        build(moe_config()),
        granularity=EVERYTHING,
        steps_per_block=steps_per_block,
        state=state,
        weight_decay=0.1,
        gradient_clipping=0.5,
        gradient_accumulation_steps=2,
    )
    train(engine, 7)
    assert_equal(weights(reference), weights(engine.module))


def test_bf16_is_adamw_on_fp32_master_weights():
    model = build(llama_config())
    for p in model.parameters():
        p.data = p.data.bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.01)
    for index in range(5):
        model(**batch(index)).loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    engine = start(build(llama_config()), dtype="bf16", granularity=EVERYTHING)
    train(engine, 5)
    assert_equal(weights(model), weights(engine.module))


def test_updates_in_chunks_equal_one_update(monkeypatch):
    whole = start(build(llama_config(), dtype=torch.bfloat16), gradient_clipping=0.1)
    train(whole, 4)
    monkeypatch.setattr("bcd.plain.UPDATE_CHUNK", 100)
    chunks = start(build(llama_config(), dtype=torch.bfloat16), gradient_clipping=0.1)
    train(chunks, 4)
    assert_equal(weights(whole.module), weights(chunks.module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [llama_config(), llama_config(tied=True), moe_config()], ids=["llama", "tied", "moe"]
)
def test_only_and_all_of_the_active_block_moves(config, dtype):
    model = build(config, dtype=dtype)
    engine = start(model, lr=0.1)
    for _ in range(len(engine.partition.blocks)):
        (index,) = engine.schedule.blocks
        before = weights(model)
        train(engine, 2)
        moved = {p.name for p in engine.partition.blocks[index].pieces}
        if config.tie_word_embeddings and "model.embed_tokens.weight" in moved:
            moved.add("lm_head.weight")
        assert changed(before, model) == moved
    assert engine.schedule.cycle == 1


def test_rows_of_a_cut_parameter():
    model = build(llama_config(layers=1))
    engine = start(model, lr=0.1, max_block_gb=8e-6)
    cut = [b for b in engine.partition.blocks if any(p.rows for p in b.pieces)]
    assert {b.name.split(".part")[0] for b in cut} == {"embeddings", "layers.0", "head"}
    for _ in range(len(engine.partition.blocks)):
        (index,) = engine.schedule.blocks
        before = weights(model)
        train(engine, 2)
        for name, value in model.state_dict().items():
            active = torch.zeros(value.shape[0], dtype=torch.bool)
            for piece in engine.partition.blocks[index].pieces:
                if piece.name == name:
                    active[slice(*(piece.rows or (None,)))] = True
            differs = (before[name] != value).flatten(1).any(1) if value.ndim > 1 else before[name] != value
            assert not differs[~active].any(), name
            assert differs[active].all() or name == "model.embed_tokens.weight", name


def test_gradients_of_rows_equal_those_of_the_whole_weight():
    """Tied weights: the same rows serve the embedding and the head."""
    reference = build(llama_config(tied=True))
    reference(**batch(0)).loss.backward()
    whole = reference.model.embed_tokens.weight.grad
    engine = start(build(llama_config(tied=True)), granularity=["model"], max_block_gb=2e-5)
    backend = engine._backend
    assert backend.groups[0].pieces[0].rows == (0, 36)
    engine.backward(engine(**batch(0)).loss)
    torch.testing.assert_close(backend.parameters[0].grad, whole[:36])
    assert backend.parameters[0].grad.untyped_storage().nbytes() == 36 * 32 * 4


def test_two_row_ranges_of_one_weight_at_once():
    whole = start(build(llama_config()), granularity=["lm_head", "model"])
    parts = start(
        build(llama_config()),
        granularity=["lm_head", "model"],
        max_block_gb=1.4e-5,
        active_blocks=4,
        steps_per_block=9,
    )
    assert len([p for g in parts._backend.groups for p in g.pieces if p.name == "lm_head.weight"]) > 1
    engine_weight = whole.module.lm_head.weight
    before = engine_weight.clone()
    train(whole, 1)
    loss = parts(**batch(0)).loss
    parts.backward(loss)
    rows = [p for g in parts._backend.groups for p in g.pieces]
    parts.step()
    covered = [r for p in rows for r in range(*p.rows)]
    torch.testing.assert_close(parts.module.lm_head.weight[covered], engine_weight[covered])
    assert not torch.equal(before, engine_weight)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("cut", [None, 2e-5])
def test_state_bytes_are_as_predicted(dtype, cut):
    engine = start(build(moe_config()), dtype=dtype, always_on=["*norm*"], expert_groups=2, max_block_gb=cut)
    for _ in range(len(engine.partition.blocks)):
        engine.backward(engine(**batch(0)).loss)
        backend = engine._backend
        gradients = sum(p.grad.nbytes for p in backend.parameters)
        groups = [[piece.numel for piece in group.pieces] for group in backend.groups]
        engine.step()
        measured = sum(t.nbytes for s in engine.optimizer.state.values() for t in s.values())
        if dtype == "bf16":
            measured += sum(m.nbytes for group in backend.masters for m in group)
        assert (gradients, measured) == state_bytes(groups, dtype=dtype)
        train(engine, 1)


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_nothing_of_an_old_block_stays_alive(state):
    engine = start(build(llama_config(), dtype=torch.bfloat16), state=state, steps_per_block=1, max_block_gb=5e-5)
    cycle = len(engine.partition.blocks)

    def alive():
        gc.collect()
        storages = {}
        for item in gc.get_objects():
            if isinstance(item, torch.Tensor):
                storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        return sum(storages.values())

    train(engine, cycle)
    first = alive()
    train(engine, 3 * cycle)
    assert alive() == first
    kept = {key for states in engine._kept.values() for item in states for key in item}
    assert kept == ({"residual"} if state == "reset" else {"residual", "exp_avg", "exp_avg_sq", "step"})


def test_kept_state_goes_on_and_reset_state_starts_anew():
    for state, expected in (("keep", 3.0), ("reset", 1.0)):
        engine = start(build(llama_config()), state=state)
        train(engine, 2 * len(engine.partition.blocks) + 1)
        steps = {float(s["step"]) for s in engine.optimizer.state.values()}
        assert steps == {expected}


def test_always_on_state_is_never_reset():
    engine = start(build(llama_config()), state="reset", always_on=["model.norm"])
    train(engine, 5)
    assert [len(g["params"]) for g in engine.optimizer.param_groups] == [1, 9]
    steps = [float(engine.optimizer.state[g["params"][0]]["step"]) for g in engine.optimizer.param_groups]
    assert steps == [5.0, 1.0]


def test_updates_below_bf16_resolution_add_up_over_visits():
    """A weight near 1 moves by 2e-4 an update, far below bf16's 4e-3 there: lost at each switch unless the
    fp32 residual is kept."""
    model = build(llama_config(), dtype=torch.bfloat16)
    model.model.layers.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    engine = start(model, granularity=["model.norm", "lm_head"], lr=2e-4, steps_per_block=2, state="reset")
    before = model.model.norm.weight.detach().clone()
    train(engine, 4)
    assert torch.equal(before, model.model.norm.weight)
    train(engine, 48)
    assert not torch.equal(before, model.model.norm.weight)


def test_a_weight_changed_meanwhile_stays_changed():
    model = build(llama_config(), dtype=torch.bfloat16)
    engine = start(model, granularity=["model", "lm_head"], steps_per_block=1)
    train(engine, 1)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    train(engine, 1)
    index = [p.name for p in engine._backend.groups[0].pieces].index("model.norm.weight")
    assert (engine._backend.masters[0][index] - 3.0).abs().max() < 0.01


def test_backward_stops_at_the_active_block_and_gradients_are_the_full_ones():
    reference = build(llama_config(layers=4))
    reference(**batch(0)).loss.backward()
    for checkpointing in (False, True, "by the user"):
        model = build(llama_config(layers=4))
        if checkpointing == "by the user":
            model.activation_checkpointing_enable({"use_reentrant": True})
        engine = start(model, activation_checkpointing=checkpointing is True, weight_decay=0.0)
        for block in engine.partition.blocks:
            calls, entered = [0] * 4, set()
            handles = [
                layer.self_attn.register_forward_hook(lambda *_, i=i, c=calls: c.__setitem__(i, c[i] + 1))
                for i, layer in enumerate(model.model.layers)
            ]
            for i, layer in enumerate(model.model.layers):
                handles.append(layer.mlp.register_full_backward_hook(lambda *_, i=i, e=entered: e.add(i)))
            engine.backward(engine(**batch(0)).loss)
            for handle in handles:
                handle.remove()
            lowest = max(0, block.depth - 1)
            assert entered == set(range(lowest, 4))
            assert calls == [2 if checkpointing and i >= lowest else 1 for i in range(4)]
            for piece, parameter in zip(block.pieces, engine._backend.parameters, strict=True):
                torch.testing.assert_close(parameter.grad, reference.get_parameter(piece.name).grad)
                parameter.grad.zero_()
            engine.step()
            engine.switch()
        assert engine.schedule.cycle == 1


def test_every_part_trains_by_default_and_the_frozen_does_not():
    model = build(llama_config(layers=12, width=8))
    model.model.layers[3].requires_grad_(False)
    before = weights(model)
    engine = start(model, steps_per_block=1)
    train(engine, len(engine.partition.blocks))
    frozen = {name for name in before if ".layers.3." in name}
    assert changed(before, model) == before.keys() - frozen


def test_each_visit_has_exactly_k_updates():
    for order in ("ascending", "descending", "shuffled", "importance"):
        engine = start(build(llama_config()), steps_per_block=3, order=order, seed=5)
        visits = []
        for index in range(24):
            visits.append(engine.active_blocks)
            train(engine, 1, first=index)
        assert all(visits.count(v) == 6 for v in visits)
        assert all(len(set(visits[i : i + 3])) == 1 for i in range(0, 24, 3))


def test_skipped_updates_do_not_count():
    engine = start(build(llama_config()))
    before = weights(engine.module)
    for _ in range(3):
        engine.backward(engine(**batch(0)).loss * float("nan"))
        engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.schedule.inner_step) == (0, 3, 0)
    assert not engine.was_step_applied()
    assert changed(before, engine.module) == set() and math.isnan(engine.get_global_grad_norm())
    train(engine, 1)
    assert engine.was_step_applied() and engine.global_steps == 1 and math.isfinite(engine.get_global_grad_norm())


def test_switch_and_save_in_the_middle_of_an_accumulation_are_errors(tmp_path):
    engine = start(build(llama_config()), gradient_accumulation_steps=2)
    engine.backward(engine(**batch(0)).loss)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boundary"):
            engine.switch()
        with pytest.raises(RuntimeError, match="boundary"):
            engine.save_checkpoint(tmp_path)
        if engine.micro_steps == 0:
            engine.step()
    engine.backward(engine(**batch(0)).loss)
    engine.step()
    engine.switch()
    assert engine.active_blocks == ("layers.0",)


def test_norm_and_clipping_are_of_the_active_gradients():
    engine = start(build(llama_config()))
    engine.backward(engine(**batch(0)).loss)
    expected = torch.nn.utils.get_total_norm([p.grad for p in engine._backend.parameters])
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(expected.item())


def test_weight_decay_groups():
    model = build(llama_config())
    engine = start(model, granularity=EVERYTHING, weight_decay=0.5, no_decay=["*norm*"], lr=0.1)
    assert [g["weight_decay"] for g in engine.optimizer.param_groups] == [0.5, 0.0]
    unused = model.model.embed_tokens.weight[71].clone()  # token 71 in no batch: its gradient is zero
    tokens = torch.randint(0, 70, (2, 16))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    torch.testing.assert_close(model.model.embed_tokens.weight[71], unused * (1 - 0.1 * 0.5))


def test_learning_rate_is_ours():
    engine = start(
        build(llama_config()), lr=1.0e-3, lr_schedule="linear", total_steps=10, warmup_steps=2, switch_warmup=1
    )
    rates = []
    for index in range(4):
        rates.append(engine.get_lr()[0])
        assert {g["lr"] for g in engine.optimizer.param_groups} == {rates[-1]}
        train(engine, 1, first=index)
    # Warm-up over two steps and after each switch over one; then linear from step 2 to step 10.
    assert rates == pytest.approx([0.25e-3, 1e-3, 0.5e-3, 1e-3 * 7 / 8])
    engine.set_lr(2e-3)
    assert engine.get_lr() == [1e-3]  # two updates a block: the second block is just over
    train(engine, 1)
    assert engine.optimizer.param_groups[0]["lr"] == 2e-3 and engine.get_lr() == [2e-3]


def test_gradient_accumulation_equals_the_large_batch():
    large, small = (start(build(llama_config()), gradient_accumulation_steps=n) for n in (1, 2))
    for index in range(4):
        halves = [batch(2 * index + i) for i in range(2)]
        joined = {key: torch.cat([half[key] for half in halves]) for key in halves[0]}
        large.backward(large(**joined).loss)
        large.step()
        for half in halves:
            small.backward(small(**half).loss)
            small.step()
    for name, value in large.module.state_dict().items():
        torch.testing.assert_close(value, small.module.state_dict()[name], atol=1e-4, rtol=1e-4)
    assert (small.micro_steps, small.global_steps) == (8, 4)


@pytest.mark.parametrize("order", ["shuffled", "importance"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(dtype="bf16", state="reset"),
        dict(dtype="bf16", max_block_gb=5e-5, always_on=["*norm*"], no_decay=["*norm*"]),
        dict(active_blocks=2, gradient_accumulation_steps=2, switch_warmup=2),
    ],
    ids=["fp32", "reset", "rows", "two"],
)
def test_resume_in_the_middle_of_a_block_is_bit_exact(order, options, tmp_path):
    options = dict(order=order, steps_per_block=3, **options)
    through = start(build(llama_config()), **options)
    losses = train(through, 19)
    first = start(build(llama_config()), **options)
    assert train(first, 11) == losses[: len(losses) * 11 // 19]
    assert first.save_checkpoint(tmp_path, client_state={"position": 11})
    del first
    second = start(build(llama_config(), seed=9), **options)
    train(second, 2)
    path, client = second.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step11") and client == {"position": 11}
    assert train(second, 8, first=11) == losses[len(losses) * 11 // 19 :]
    assert_equal(weights(through.module), weights(second.module))
    assert second.schedule.state_dict() == through.schedule.state_dict()


def test_a_rate_written_into_the_groups_holds_for_one_update():
    engine = start(build(llama_config()), lr=1e-3, steps_per_block=3, switch_warmup=1)
    train(engine, 1)
    used = []
    step = engine._backend.step
    engine._backend.step = lambda rate, boundary: used.append(rate) or step(rate, boundary)
    for rate in (5e-3, None, 4e-3):
        if rate:
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
        train(engine, 1)
    assert used == [5e-3, 1e-3, 2e-3]  # the last one is the first after a switch


class Wrapped(torch.nn.Module):
    """A model whose loss reads the head's weight and does not call the head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        logits = hidden @ self.model.lm_head.weight.T
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss)


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_weight_that_is_read_without_its_module(tied):
    model = Wrapped(build(llama_config(tied=tied)))
    model.model.activation_checkpointing_enable()
    engine = start(model, max_block_gb=2e-5, lr=0.1, steps_per_block=1)
    reference = Wrapped(build(llama_config(tied=tied)))
    for _ in engine.partition.blocks:
        reference.load_state_dict(model.state_dict())
        reference.zero_grad()
        reference(**batch(0)).loss.backward()
        engine.backward(engine(**batch(0)).loss)
        pieces = [piece for group in engine._backend.groups for piece in group.pieces]
        for piece, parameter in zip(pieces, engine._backend.parameters, strict=True):
            whole = reference.get_parameter(piece.name).grad
            torch.testing.assert_close(parameter.grad, whole[slice(*(piece.rows or (None,)))])
        engine.step()
    assert not any("weight" in module.__dict__ for module in model.modules())


def test_rows_that_are_never_used_are_an_error():
    engine = start(build(llama_config()), granularity=["lm_head", "model"], max_block_gb=2e-5)
    engine._pending = True
    with pytest.raises(RuntimeError, match="'lm_head.weight' were never used"):
        engine.step()


def test_random_state_is_part_of_a_checkpoint(tmp_path):
    engine = start(build(llama_config()))
    engine.save_checkpoint(tmp_path)
    expected = torch.rand(3)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_checkpoints_that_do_not_match_are_refused(tmp_path):
    engine = start(build(llama_config()))
    assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.save_checkpoint(tmp_path, tag="one")
    engine.save_checkpoint(tmp_path, tag="not the latest", save_latest=False)
    assert (tmp_path / "latest").read_text() == "one" and (tmp_path / "not the latest").is_dir()
    with pytest.raises(ValueError, match="no checkpoint 'two'"):
        engine.load_checkpoint(tmp_path, tag="two")
    for other, message in (
        (start(build(llama_config()), granularity="module"), "partition"),
        (start(build(llama_config()), dtype="bf16"), "dtypes"),
        (start(build(llama_config()), steps_per_block=3), "steps_per_block"),
        (start(build(llama_config()), order="descending"), "order"),
    ):
        before = weights(other.module)
        with pytest.raises(ValueError, match=message):
            other.load_checkpoint(tmp_path)
        assert changed(before, other.module) == set()


def test_a_checkpoint_can_be_written_again(tmp_path):
    engine = start(build(llama_config()))
    engine.save_checkpoint(tmp_path, tag="same")
    train(engine, 1)
    engine.save_checkpoint(tmp_path, tag="same")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "same"]
    other = start(build(llama_config()))
    other.load_checkpoint(tmp_path)
    assert other.global_steps == 1
    # A process that dies while it replaces a checkpoint leaves the old one beside its place.
    (tmp_path / "same").rename(tmp_path / "same.old")
    assert other.load_checkpoint(tmp_path)[0] == str(tmp_path / "same.old")


KILLED = """
import sys, torch
torch.set_num_threads(1)
from tests.bcd.test_engine import start, train
from tests.bcd.models import build, llama_config
engine = start(build(llama_config()), steps_per_block=5, order="shuffled", dtype="bf16")
engine.load_checkpoint(sys.argv[1])
while engine.global_steps < 60:
    train(engine, 1, first=engine.global_steps)
    engine.save_checkpoint(sys.argv[1], tag="last")
    print(engine.global_steps, flush=True)
torch.save(engine.module.state_dict(), sys.argv[1] + "/final.pt")
"""


def test_sigkill_in_the_middle_of_a_block(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 13:
            time.sleep(0.01)  # somewhere within a step or a save
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "final.pt").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    engine = start(build(llama_config()), steps_per_block=5, order="shuffled", dtype="bf16")
    train(engine, 60)
    assert_equal(weights(engine.module), torch.load(tmp_path / "final.pt"))


@pytest.mark.parametrize("config", [llama_config(tied=True), moe_config()], ids=["tied", "moe"])
def test_export_is_a_plain_checkpoint(config, tmp_path):
    engine = start(build(config), max_block_gb=4e-5, expert_groups=2)
    train(engine, 3)
    engine.export(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(again(**batch(0)).logits, engine.module(**batch(0)).logits)


def test_train_and_eval():
    engine = start(build(llama_config()))
    assert not engine.eval().module.training and engine.train().module.training
    assert engine.device.type == "cpu" and engine.zero_optimization_stage() == 0
    with torch.no_grad():
        assert not engine(**batch(0)).loss.requires_grad


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(steps_per_block=0), "steps_per_block is 0"),
        (dict(granularity=["model", "lm_haed"]), "lm_haed"),
        (dict(active_blocks=9), "active_blocks is 9"),
        (dict(always_on=["*"]), "always_on"),
        (dict(stepsperblock=3), "did you mean"),
    ],
)
def test_bad_settings_before_training(config, message):
    with pytest.raises(ValueError, match=message):
        bcd.initialize(model=build(llama_config()), config=config)
