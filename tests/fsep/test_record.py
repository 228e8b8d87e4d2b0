import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from fsep import TraceRecorder

COMMON = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_experts_per_tok=2,
)


def models():
    torch.manual_seed(0)
    yield MixtralForCausalLM(MixtralConfig(num_local_experts=4, **COMMON))
    yield Qwen2MoeForCausalLM(
        Qwen2MoeConfig(num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8, **COMMON)
    )


@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_counts_equal_the_router_logits(model):
    torch.manual_seed(1)
    batches = torch.randint(0, 64, (2, 3, 2, 10))  # steps, micro-batches, batch, sequence
    expected = np.zeros((2, 2, 3, 1, 4), int)
    with TraceRecorder(model) as recorder:
        for step, step_batches in enumerate(batches):
            for micro, batch in enumerate(step_batches):
                logits = model(batch, output_router_logits=True).router_logits
                recorder.end_microbatch()
                for layer, of_layer in enumerate(logits):
                    chosen = of_layer.topk(2).indices.flatten()
                    expected[step, layer, micro, 0] = torch.bincount(chosen, minlength=4)
            recorder.end_step(10 * step)
    trace = recorder.trace()
    assert np.array_equal(trace.tokens, expected)
    assert trace.iteration.tolist() == [0, 10]
    model(batches[0, 0])  # the hooks are gone
    assert not recorder._counts


def test_recomputation_is_not_counted():
    model = next(models())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    batch = torch.randint(0, 64, (2, 10))
    with TraceRecorder(model) as recorder:
        model(batch, labels=batch).loss.backward()
        recorder.end_microbatch()
        recorder.end_step(0)
    assert recorder.trace().tokens.sum((2, 3, 4)).tolist() == [[40, 40]]


def test_refuses():
    with pytest.raises(ValueError, match="Linear has no router"):
        TraceRecorder(torch.nn.Linear(2, 2))
    recorder = TraceRecorder(next(models()))
    with pytest.raises(ValueError, match="no step recorded yet"):
        recorder.trace()
    with pytest.raises(ValueError, match="router 0 did not run"):
        recorder.end_microbatch()
    with pytest.raises(ValueError, match="the step has 0 micro-batches: expected at least 1"):
        recorder.end_step(0)


def test_refuses_mixed_numbers_of_experts_and_microbatches():
    model = next(models())
    batch = torch.randint(0, 64, (1, 4))
    with TraceRecorder(model) as recorder:
        model(batch)
        recorder.end_microbatch()
        recorder.end_step(0)
        for _ in range(2):
            model(batch)
            recorder.end_microbatch()
        with pytest.raises(ValueError, match="the step has 2 micro-batches: expected 1"):
            recorder.end_step(1)
    model.model.layers[1].mlp.gate.num_experts = 5
    with pytest.raises(ValueError, match=r"\[4, 5\] experts"):
        TraceRecorder(model)
