import pytest
import torch

import bcd
from tests.bcd.models import batch, build, llama_config, moe_config


def epochs(model, updates=48, **config):
    engine = bcd.initialize(model=model, config={"lr": 1e-2, "steps_per_block": 8, **config})
    losses = []
    for index in range(updates):
        loss = engine(**batch(index % 3)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("config", [llama_config(layers=3), moe_config()], ids=["llama", "moe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bit_equal_to_training_without_it(where, config, checkpointing, tmp_path):
    directory = str(tmp_path / "cache") if where == "disk" else None
    plain, expected = epochs(build(config), activation_checkpointing=checkpointing)
    engine, losses = epochs(
        build(config), activation_checkpointing=checkpointing, prefix_cache={"directory": directory}
    )
    assert losses == expected
    for name, value in plain.module.state_dict().items():
        assert torch.equal(value, engine.module.state_dict()[name])
    # Blocks with a frozen layer below see three batches in eight updates.
    visits = [engine.partition.blocks[i // 8 % len(engine.partition.blocks)] for i in range(0, 48, 8)]
    deep = sum(block.depth > 1 for block in visits)
    assert engine._prefix.misses == 3 * deep and engine._prefix.hits == 5 * deep
    if where == "disk":
        assert len(list((tmp_path / "cache").iterdir())) == len(engine._prefix.entries)


def test_skipped_layers_do_not_run_and_a_switch_forgets():
    model = build(llama_config(layers=3))
    engine, _ = epochs(model, updates=0, prefix_cache={}, order="descending")
    runs = [0, 0, 0]
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    for _ in range(2):
        engine.backward(engine(**batch(0)).loss)
        engine.step()
    assert runs == [1, 1, 1]
    engine.switch()
    assert engine.active_blocks == ("layers.2",) and not engine._prefix.entries
    engine.backward(engine(**batch(0)).loss)
    engine.step()
    assert runs == [2, 2, 2]
    with torch.no_grad():
        engine(**batch(0))  # without gradients the cache stays out
    assert runs == [3, 3, 3]


def test_limit_of_bytes():
    size = 2 * 16 * 32 * 4
    engine, _ = epochs(
        build(llama_config()), updates=7, order="descending", prefix_cache={"max_gb": 2 * size / 1e9}
    )
    assert len(engine._prefix.entries) == 2 and engine._prefix.bytes == 2 * size
    assert engine._prefix.hits == 3  # of the batches 0 1 2 0 1 2 0 the first two fit


def test_inputs_other_than_labels_are_part_of_the_key():
    engine, _ = epochs(build(llama_config()), updates=0, order="descending", prefix_cache={})
    one = batch(0)
    for extra in ({}, {"attention_mask": torch.ones(2, 16, dtype=torch.long)}, {"labels": batch(1)["input_ids"]}):
        engine(**{**one, **extra})
    assert engine._prefix.misses == 2 and engine._prefix.hits == 1


def test_refused_where_it_would_be_wrong():
    dropout = llama_config()
    dropout.attention_dropout = 0.1
    routers = moe_config()
    routers.output_router_logits = True
    for config, message in ((dropout, "dropout"), (routers, "routers")):
        with pytest.raises(ValueError, match=message):
            epochs(build(config), updates=0, prefix_cache={})
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="decoder layers"):
        epochs(plain, updates=0, prefix_cache={})
