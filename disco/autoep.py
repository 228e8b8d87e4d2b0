"""Experts divided by DeepSpeed's own expert parallelism: each process has E / N whole experts, for good.

Shapes: L MoE layers, N processes, E experts, F expert width, H hidden width.
"""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disco.checkpoint import expected
from disco.engine import DTYPES
from disco.experts import Replicated
from fsep.norm import check_engine

# Names in DeepSpeed's layer -> those in the Hugging Face block; w1 and w3 are one matrix there, gate over up.
HUGGING_FACE = {
    "router.gate.weight": "gate.weight",
    "experts.w1": "experts.gate_up_proj",
    "experts.w3": "experts.gate_up_proj",
    "experts.w2": "experts.down_proj",
    "shared_experts.": "shared_expert.",
    "shared_experts_gate.": "shared_expert_gate.",
}
_NAMES = re.compile("|".join(rf"(?<=\.mlp\.){re.escape(name)}" for name in HUGGING_FACE))


def hugging_face_name(name: str) -> str:
    """The name in the Hugging Face model of a parameter of the model that DeepSpeed has changed."""
    return _NAMES.sub(lambda found: HUGGING_FACE[found[0]], name)


class AutoEP(Replicated):
    """`autoep`: DeepSpeed replaces each MoE block, router included, when its engine is made."""

    def load(self, dtype: str) -> nn.Module:
        model = super().load(dtype)
        for module in model.modules():
            # DeepSpeed 0.19 rewrites transformers' recorders of router logits, as those of another version were.
            # Ours is the only loss that reads routers, and does so by itself.
            recorders = getattr(module, "_can_record_outputs", None)
            if isinstance(recorders, dict):
                kept = {name: recorder for name, recorder in recorders.items() if name != "router_logits"}
                module._can_record_outputs = kept
        return model

    def settings(self, model: nn.Module) -> dict:
        # Without route_norm DeepSpeed's preset of Qwen3 divides the weights by their sum, whatever the config says.
        normalised = getattr(model.config, "norm_topk_prob", True)
        return {
            "expert_parallel": {"enabled": True, "autoep_size": dist.get_world_size(), "route_norm": normalised}
        }

    def begin(self, engine) -> None:
        check_engine(engine)
        loss = engine.module
        for layer in layers(engine):
            layer.router.register_forward_hook(
                lambda router, inputs, output: loss.keep(lambda: router.gate(inputs[0]), output[1])
            )

    def figures(self, engine, counts_LE: Tensor | None) -> dict:
        if counts_LE is None:
            return {}
        device_LN = counts_LE.unflatten(1, (dist.get_world_size(), -1)).sum(-1)
        return {"imbalance": (device_LN.amax(1) / device_LN.mean(1)).tolist()}

    def export(self, engine, folder: Path) -> None:
        model, state = engine.module.model, {}
        known, dtype = expected(model.config), DTYPES[self.job.dtype]
        for name, tensor in model.state_dict().items():
            if re.search(r"\.experts\.w[123]$", name):
                tensor = gathered(tensor)
            whole = hugging_face_name(name)
            if dist.get_rank() == 0:
                tensor = tensor.detach().to("cpu", known.dtype(whole, dtype))
                # w1 comes before w3, so that gate is over up.
                state[whole] = torch.cat([state[whole], tensor], 1) if whole in state else tensor
        if dist.get_rank() == 0:
            model.config.dtype = dtype
            model.save_pretrained(folder, state_dict=state)
        dist.barrier()


def layers(engine) -> list[nn.Module]:
    """DeepSpeed's MoE layers, front to back."""
    return [module for module in engine.module.modules() if getattr(module, "_is_autoep_layer", False)]


def gathered(own: Tensor) -> Tensor:
    """[E, ...] on all processes from each one's [E / N, ...]; a collective call."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)
