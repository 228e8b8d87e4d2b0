import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fsep import compute
from fsep.space import ExpertSpace
from tests.disco.tiny_models import tiny_config

H, F, SLOTS = 24, 8, 4


def hugging_face(dtype):
    torch.manual_seed(0)
    experts = MixtralExperts(tiny_config("mixtral", experts=SLOTS))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    experts.config._experts_implementation = "eager"
    return experts.to(dtype)


@pytest.mark.parametrize("slot_rows", [[3, 0, 5, 2], [0, 0, 0, 0], [0, 7, 0, 0]])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("padding", [0, 5, 8])
def test_equals_hugging_face_with_loop_and_grouped_kernel(monkeypatch, slot_rows, kernel, padding):
    monkeypatch.setattr(compute, "grouped_mm_pays", lambda x, weight: kernel)
    dtype, space = torch.float32, ExpertSpace(hidden=H, width=F)
    reference, rows = hugging_face(dtype), sum(slot_rows)
    x = torch.randn(rows, H).requires_grad_()
    chosen = torch.repeat_interleave(torch.arange(SLOTS), torch.tensor(slot_rows))[:, None]
    wanted = reference(x, chosen, torch.ones(rows, 1))
    grad = torch.randn(rows, H)
    if rows:
        wanted.backward(grad)
    flat = torch.cat([reference.gate_up_proj.flatten(1), reference.down_proj.flatten(1)], 1).detach()
    flat = torch.nn.functional.pad(flat, (0, padding))
    act, grads = ACT2FN["silu"], torch.full_like(flat, torch.nan)
    y, up = compute.forward(x.detach(), flat, slot_rows, space, act)
    grad_x = compute.backward(grad, x.detach(), up, flat, slot_rows, space, act, grads)
    assert not grads[:, space.size :].any()
    if rows:
        gate_up, down = compute.matrices(grads, space)
        torch.testing.assert_close(y, wanted.detach())
        torch.testing.assert_close(grad_x, x.grad)
        torch.testing.assert_close(gate_up, reference.gate_up_proj.grad)
        torch.testing.assert_close(down, reference.down_proj.grad)
    else:  # Hugging Face's module has no gradient then
        assert y.shape == grad_x.shape == (0, H) and not grads.any()


def test_the_kernel_is_for_gpus():
    weight = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    assert not compute.grouped_mm_pays(torch.zeros(4, 8, dtype=torch.bfloat16), weight)
