import pytest
import torch

import bcd
from bcd.expansion import STATISTICS_BETA
from tests.bcd.models import batch, build, llama_config, moe_config

ABOVE = ["model.layers.2", "model.norm", "lm_head"]


def start(model, **config):
    return bcd.initialize(model=model, config={"lr": 1e-2, "expansion": {"lr_ratio": 0.5}, **config})


def names_moved(before, model):
    return {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def step(engine, index=0):
    engine.backward(engine(**batch(index)).loss)
    engine.step()


def normalised(gradient):
    """Shazeer and Stern 2018, equation 4, on the first gradient: its own row and column sums; then clipped."""
    square = gradient.double().square()
    if gradient.ndim == 2:
        square = square.sum(1, keepdim=True) * square.sum(0, keepdim=True) / square.sum()
    update = gradient.double() / square.sqrt()
    return (update / max(1.0, update.square().mean().sqrt().item())).float()


def test_layers_above_move_along_the_normalised_gradient():
    reference = build(llama_config(layers=3))
    reference(**batch(0)).loss.backward()
    model = build(llama_config(layers=3))
    engine = start(
        model, weight_decay=0.1, granularity=["model.layers.1", "model.embed_tokens", "model.layers.0", *ABOVE]
    )
    before = snapshot(model)
    step(engine)
    below = {name for name in before if "layers.0" in name or "embed" in name}
    assert names_moved(before, model) == before.keys() - below
    for name in ("lm_head.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight"):
        gradient = reference.get_parameter(name).grad
        expected = before[name] * (1 - 1e-2 * 0.5 * 0.1) - 1e-2 * 0.5 * normalised(gradient)
        torch.testing.assert_close(model.get_parameter(name).data, expected)
        assert model.get_parameter(name).grad is None


def test_updates_happen_at_accumulation_boundaries_and_follow_the_switch():
    model = build(llama_config())
    engine = start(model, gradient_accumulation_steps=2, steps_per_block=1, order="ascending")
    before = snapshot(model)
    step(engine)
    assert names_moved(before, model) == set()
    step(engine, 1)
    assert names_moved(before, model) == before.keys()
    for index in range(2, 6):
        step(engine, index)
    assert engine.active_blocks == ("head",)
    before = snapshot(model)
    step(engine, 6)
    step(engine, 7)
    assert names_moved(before, model) == {"model.norm.weight", "lm_head.weight"}


def test_frozen_stays_frozen_and_bad_gradients_move_nothing():
    model = build(llama_config())
    model.lm_head.weight.requires_grad_(False)
    engine = start(model)
    before = snapshot(model)
    engine.backward(engine(**batch(0)).loss * float("nan"))
    engine.step()
    assert names_moved(before, model) == set()
    step(engine)
    assert "lm_head.weight" not in names_moved(before, model)


def test_small_updates_of_bf16_weights_are_not_lost():
    """Rounded to the nearest, a step of 1e-4 never moves a bf16 weight of 1."""
    model = build(llama_config(), dtype=torch.bfloat16)
    engine = start(model, lr=2e-4, steps_per_block=1000)
    norms = model.model.norm.weight
    for index in range(20):
        step(engine, index)
    moved = (norms != 1).float().mean().item()
    assert 0.05 < moved < 0.95  # about 20 steps of a fortieth of the spacing


def test_resume_is_bit_exact(tmp_path):
    through = start(build(llama_config(), dtype=torch.bfloat16), steps_per_block=2)
    for index in range(3):
        step(through, index)
    through.save_checkpoint(tmp_path)
    other = start(build(llama_config(), seed=4, dtype=torch.bfloat16), steps_per_block=2)
    other.load_checkpoint(tmp_path)
    for index in range(3, 7):
        step(through, index)
        step(other, index)
    for name, value in through.module.state_dict().items():
        assert torch.equal(value, other.module.state_dict()[name])


def test_rates_written_by_the_caller_reach_the_expansion(tmp_path):
    """Before forward: at once. After backward, where its updates are made already: at the next one."""
    engine = start(build(llama_config()), lr=1e-2)
    used = []
    engine._expansion.enable = lambda boundary, rate, step: used.append(rate)

    def write(rate):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate

    write(3e-3)
    step(engine)
    for rate in (5e-3, 4e-3):
        engine.backward(engine(**batch(0)).loss)
        write(rate)
        engine.step()
    engine.save_checkpoint(tmp_path)
    step(engine)
    engine.load_checkpoint(tmp_path)
    step(engine)
    step(engine)
    assert used == [3e-3, 3e-3, 5e-3, 4e-3, 4e-3, 1e-2]


def test_second_moments_are_running_means_of_rows_and_columns():
    """Against plain formulas in fp64, over packed experts [E, rows, columns], with a row that has no gradient."""
    engine = start(build(moe_config()))
    expansion = engine._expansion
    generator = torch.Generator().manual_seed(0)
    rows = columns = 0.0
    for step in range(1, 4):
        gradient = torch.randn(3, 5, 4, generator=generator)
        gradient[:, 2] = 0
        square = gradient.double().square()
        rows = STATISTICS_BETA * rows + (1 - STATISTICS_BETA) * square.mean(2)
        columns = STATISTICS_BETA * columns + (1 - STATISTICS_BETA) * square.mean(1)
        moment = rows[:, :, None] * columns[:, None] / rows.mean(1)[:, None, None] / (1 - STATISTICS_BETA**step)
        expected = (gradient.double() / moment.sqrt()).nan_to_num(0.0)
        expected /= max(1.0, expected.square().mean().sqrt().item())
        torch.testing.assert_close(
            expansion._normalise("x", gradient.clone()).double(), expected, atol=1e-4, rtol=1e-4
        )


def test_what_is_not_decayed_is_not():
    for no_decay, moved in (((), True), (("*norm*",), False)):
        model = build(llama_config())
        engine = start(model, weight_decay=0.5, no_decay=no_decay)
        engine._expansion.enable(True, 1e-2, 0)
        weight = model.model.norm.weight
        weight.grad = torch.zeros_like(weight)
        engine._expansion._update("model.norm.weight", weight)
        assert (weight != 1).any().item() is moved


def test_ends_trains_everything_by_two_blocks():
    model = build(llama_config(layers=3))
    engine = start(model, order="ends", steps_per_block=1)
    before, visits, updates = snapshot(model), [], []
    update = engine._expansion._update
    engine._expansion._update = lambda name, p: updates.append(name) or update(name, p)
    for index in range(3):
        visits.append(engine.active_blocks)
        step(engine, index)
    assert visits == [("embeddings",), ("head",), ("head",)]
    assert names_moved(before, model) == before.keys() and engine.schedule.cycle == 1
    assert len(updates) == 3 * 9 + 2  # all above the embeddings, once; nothing above the head


def test_factored_moments_for_the_active_blocks_too():
    """The optimizer holds the norm alone; embeddings and head move by the whole rate, layers by a share."""
    model = build(llama_config(layers=3))
    expansion = {"active": "factored", "lr_ratio": 0.25}
    engine = start(
        model, expansion=expansion, order="ends", steps_per_block=1, always_on=("model.norm",), weight_decay=0.0
    )
    gradients = {}
    normalise = engine._expansion._normalise
    engine._expansion._normalise = lambda name, g: gradients.setdefault(name, normalise(name, g))
    for index, (block, names) in enumerate(
        [("embeddings", model.state_dict().keys()), ("head", {"lm_head.weight", "model.norm.weight"})]
    ):
        before = snapshot(model)
        gradients.clear()
        assert engine.active_blocks == (block,)
        step(engine, index)
        assert names_moved(before, model) == set(names)
        assert gradients.keys() == names - {"model.norm.weight"}
        for name, gradient in gradients.items():
            rate = 1e-2 * (0.25 if "layers" in name else 1.0)
            torch.testing.assert_close(model.state_dict()[name], before[name] - rate * gradient)
    assert sum(t.numel() for s in engine.optimizer.state.values() for t in s.values()) <= 2 * 32 * 2 + 1


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = build(llama_config())
    engine = start(model)
    engine._expansion.enable(True, 1e-2, 0)
    weight = model.lm_head.weight
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, 0] = torch.nan
    engine._expansion._update("lm_head.weight", weight)
    assert torch.equal(weight, before) and weight.grad is None and not engine._expansion.state


@pytest.mark.parametrize("active", ["adamw", "factored"])
@pytest.mark.parametrize("order", ["ends", "ascending"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_are_as_predicted(order, dtype, active):
    config = {"order": order, "steps_per_block": 1, "dtype": dtype, "always_on": ("model.norm",)}
    config["expansion"] = {"active": active}
    engine = bcd.initialize(model=build(moe_config()), config={"lr": 1e-3, **config})
    measured = {}
    for index in range(len(engine.schedule.current_order)):
        engine.backward(engine(**batch(index)).loss)
        gradients = sum(p.grad.nbytes for p in engine._backend.parameters if p.grad is not None)
        gradients += max((engine.module.get_parameter(n).nbytes for n in engine._expansion.names), default=0)
        (name,) = engine.active_blocks
        engine.schedule.steps_per_block = 2
        engine.step()
        measured[name] = measure(engine), gradients
        engine.switch()
    statistics = sum(t.nbytes for tensors in engine._expansion.state.values() for t in tensors)
    predicted = bcd.memory(moe_config(), config=config, dtype=dtype, sequence=16)
    optimizer, gradients = measured[predicted.block]
    assert (predicted.optimizer, predicted.gradients) == (optimizer + statistics, gradients)


def measure(engine):
    """Bytes of AdamW's state and of the master weights."""
    size = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values())
    if engine.config.dtype == "bf16":
        size += sum(m.nbytes for group in engine._backend.masters for m in group)
    return size


def test_bad_settings():
    for config, message in (
        ({"order": "ends"}, "set expansion="),
        ({"order": "ends", "expansion": {}, "active_blocks": 2}, "one at a time"),
        ({"order": "importance", "expansion": {"active": "factored"}}, "measures no norms"),
        ({"expansion": {"active": "factored"}}, "leaves AdamW nothing of block 'embeddings': set always_on"),
    ):
        with pytest.raises(ValueError, match=message):
            bcd.initialize(model=build(llama_config()), config=config)


def test_a_checkpoint_without_expansion_is_refused(tmp_path):
    bcd.initialize(model=build(llama_config())).save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="expansion off, this run on"):
        start(build(llama_config())).load_checkpoint(tmp_path)
