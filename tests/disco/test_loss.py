"""The loss against PyTorch's and Hugging Face's own."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func

from disco.loss import CausalLoss, chunked_cross_entropy, token_losses


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunked_cross_entropy_is_pytorchs(chunk, dtype):
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(31, 8, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 31, (23,))
    labels[[0, 5, 22]] = -100
    ours = chunked_cross_entropy(hidden, weight, labels, chunk)
    (ours * 0.5).backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    theirs = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    (theirs * 0.5).backward()
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    for got, expected in zip(gradients, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(got, expected, **tolerance)
    each = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")
    torch.testing.assert_close(token_losses(hidden, weight, labels, chunk), each)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_parts_get_no_gradient(frozen):
    hidden = torch.randn(4, 3, requires_grad=frozen == "weight")
    weight = torch.randn(5, 3, requires_grad=frozen == "hidden")
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3]))
    if frozen == "both":
        assert not loss.requires_grad
        return
    loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_no_label_at_all_gives_zero():
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.full((4,), -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "olmoe"])
def test_cross_entropy_is_hugging_faces(tiny_model, model_type):
    model = tiny_model(model_type)
    ids = torch.randint(0, 96, (2, 12))
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    positions = torch.arange(12).expand(2, 12)
    output = CausalLoss(model)(ids, positions, labels, tokens=22)
    expected = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(output.loss, expected)


def test_balance_loss_is_hugging_faces_layer_by_layer(tiny_model):
    """With the running batch's own shares, our balance loss is the mean over layers of Hugging Face's."""
    model = tiny_model()
    module = CausalLoss(model, aux=0.01, z=0.001)
    ids = torch.randint(0, 96, (2, 12))
    labels = ids.clone()
    labels[0, 6:] = -100
    positions = torch.arange(12).expand(2, 12)
    tokens = int((labels != -100).sum())
    first = module(ids, positions, labels, tokens)
    assert first.counts_LE.sum(-1).tolist() == [2 * tokens] * 2
    # Before anything is known shares count as balanced, and a balanced load costs top_k.
    torch.testing.assert_close(first.balance / tokens, torch.tensor(2.0))
    module.set_share(first.counts_LE, tokens)
    second = module(ids, positions, labels, tokens)
    logits = model(input_ids=ids, output_router_logits=True).router_logits
    keep = (labels != -100).reshape(-1)
    kept = [layer.reshape(-1, 4)[keep] for layer in logits]
    expected = sum(load_balancing_loss_func((layer,), 4, 2) for layer in kept) / len(kept)
    torch.testing.assert_close(second.balance / tokens, expected)
    z = sum(layer.logsumexp(-1).square().mean() for layer in kept) / len(kept)
    torch.testing.assert_close(second.z / tokens, z)
    total = second.cross_entropy / tokens + 0.01 * expected + 0.001 * z
    torch.testing.assert_close(second.loss, total)


def test_checkpointing_changes_neither_loss_nor_gradients(tiny_model):
    ids = torch.randint(0, 96, (2, 12))
    positions = torch.arange(12).expand(2, 12)
    results = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module = CausalLoss(model, aux=0.1)
        module.set_share(torch.tensor([[9, 5, 3, 1], [1, 9, 5, 3]]), 9)
        output = module(ids, positions, ids, 24)
        output.loss.backward()
        results.append([output.loss, *(p.grad for p in model.parameters())])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
