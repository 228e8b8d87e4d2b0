"""Our loss: cross-entropy a chunk of tokens at a time, and router losses from global counts.

Shape suffixes: B sequences, S positions, N tokens with a label, H hidden, V vocabulary, L MoE layers, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from disco.family import moe_blocks, num_experts, top_k
from disco.packing import IGNORED


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(hidden @ weight.T)[label]; gradients are formed chunk by chunk in the forward pass,
    so logits never exist whole and nothing is computed twice."""

    @staticmethod
    def forward(ctx, hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, chunk: int) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_NH = torch.empty_like(hidden_NH) if need_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(labels_N), chunk):
            part = slice(begin, begin + chunk)
            logits, losses = _chunk(hidden_NH[part], weight_VH, labels_N[part])
            total += losses.sum()
            if not (need_hidden or need_weight):
                continue
            grad = logits.exp_()
            grad[torch.arange(len(grad), device=grad.device), labels_N[part]] -= 1
            grad = grad.to(hidden_NH.dtype)
            if need_hidden:
                grad_hidden_NH[part] = grad @ weight_VH
            if need_weight:
                if grad.dtype == torch.float32:
                    grad_weight_VH.addmm_(grad.T, hidden_NH[part])
                else:
                    grad_weight_VH += grad.T @ hidden_NH[part]
        ctx.save_for_backward(
            grad_hidden_NH, None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        )
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        grad_hidden_NH, grad_weight_VH = ctx.saved_tensors
        scaled = [None if grad is None else grad * grad_output for grad in (grad_hidden_NH, grad_weight_VH)]
        return *scaled, None, None


def _chunk(hidden_CH: Tensor, weight_VH: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [C, V] in fp32 and the losses [C] of one chunk."""
    logits_CV = (hidden_CH @ weight_VH.T).float()
    logits_CV -= logits_CV.logsumexp(-1, keepdim=True)
    return logits_CV, -logits_CV.gather(1, labels_C[:, None]).squeeze(1)


def chunked_cross_entropy(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, chunk: int = 1024) -> Tensor:
    """Cross-entropy summed over the labels that are not -100, fp32, with gradients for hidden and weight.

    At most `chunk` x V logits exist at a time.
    """
    keep = labels_N != IGNORED
    if not keep.all():
        hidden_NH, labels_N = hidden_NH[keep], labels_N[keep]
    return labelled_cross_entropy(hidden_NH, weight_VH, labels_N, chunk)


def labelled_cross_entropy(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, chunk: int = 1024) -> Tensor:
    """`chunked_cross_entropy` where every position has a label. Looks at no values, so it runs without any."""
    return _ChunkedCrossEntropy.apply(hidden_NH, weight_VH, labels_N, chunk)


@torch.no_grad()
def token_losses(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, chunk: int = 1024) -> Tensor:
    """Cross-entropy [N] of each token, fp32; 0 where the label is -100."""
    losses_N = hidden_NH.new_zeros(len(labels_N), dtype=torch.float32)
    kept = (labels_N != IGNORED).nonzero().squeeze(1)
    for part in kept.split(chunk):
        losses_N[part] = _chunk(hidden_NH[part], weight_VH, labels_N[part])[1]
    return losses_N


@dataclass
class LossOutput(ModelOutput):
    """What one micro-batch gives: `loss` to differentiate, and detached sums over its labelled tokens."""

    loss: Tensor | None = None
    cross_entropy: Tensor | None = None  # summed
    balance: Tensor | None = None  # summed, see CausalLoss
    z: Tensor | None = None  # summed
    counts_LE: Tensor | None = None  # tokens of each expert


class CausalLoss(nn.Module):
    """A Hugging Face causal language model, MoE or dense, with the project's loss.

    loss = [ sum CE + aux * sum_t balance_t + z * sum_t z_t ] / tokens, where `tokens` is the number of labels in
    the *global* batch, so that neither gradient accumulation nor the world size changes it.

    balance_t = mean over layers of E * sum_e f_e p_te is the load-balancing loss of Switch Transformers
    (arXiv 2101.03961, eq. 4-6; 1.0 x top-k when balanced) with f_e, the share of tokens that expert e received,
    counted over the whole previous global batch and all processes: f carries no gradient, and counting it over
    the running batch would need a second forward pass under gradient accumulation.
    z_t = mean over layers of logsumexp(router logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).
    """

    def __init__(self, model: nn.Module, *, chunk: int = 1024, aux: float = 0.0, z: float = 0.0):
        super().__init__()
        self.model = model
        self.chunk, self.aux, self.z = chunk, aux, z
        self._routed: list[tuple[Tensor, Tensor]] = []
        self._capture = False
        routers = [router for _, router, _ in moe_blocks(model)]
        experts = num_experts(model.config) if routers else 0
        self.route = bool(routers) and experts > 1
        self.selects = self.route and top_k(model.config) < experts
        if self.route:
            for router in routers:
                router.register_forward_hook(self._keep)
            # Not a registered buffer: DeepSpeed must neither cast nor broadcast it.
            self.share_LE = torch.full((len(routers), experts), top_k(model.config) / experts)

    def _keep(self, module, inputs, output):
        self.keep(lambda: output[0], output[2])

    def keep(self, logits: Callable[[], Tensor], chosen: Tensor) -> None:
        """A router has run, and chosen these experts of each token by these logits: for other layers' hooks."""
        if self._capture:  # off while activation checkpointing recomputes
            self._routed.append((logits(), chosen))

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, tokens: int) -> LossOutput:
        """input_ids, position_ids, labels [B, S], labels aligned (labels[b, s] follows position s)."""
        self._routed.clear()
        self._capture = self.route
        hidden = self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0]
        self._capture = False
        labels_N = labels.reshape(-1)
        head = self.model.get_output_embeddings().weight
        ce = chunked_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), head, labels_N, self.chunk)
        loss = ce
        balance = z = counts_LE = None
        if self.route:
            keep = labels_N != IGNORED
            balance, z, counts_LE = self._router_losses(keep)
            if self.aux:
                loss = loss + self.aux * balance
            if self.z:
                loss = loss + self.z * z
            balance, z = balance.detach(), z.detach()
        self._routed.clear()
        return LossOutput(loss=loss / tokens, cross_entropy=ce.detach(), balance=balance, z=z, counts_LE=counts_LE)

    def _router_losses(self, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        balance = z = 0.0
        counts = []
        layers = len(self._routed)
        for share_E, (logits, chosen) in zip(self.share_LE.to(keep.device), self._routed, strict=True):
            logits_NE = logits.reshape(-1, logits.shape[-1]).float()[keep]
            experts = logits_NE.shape[-1]
            mass_E = F.softmax(logits_NE, -1).sum(0)
            balance = balance + experts * (share_E * mass_E).sum() / layers
            z = z + logits_NE.logsumexp(-1).square().sum() / layers
            chosen_NK = chosen.reshape(-1, chosen.shape[-1])[keep]
            counts.append(torch.bincount(chosen_NK.flatten(), minlength=experts))
        return balance, z, torch.stack(counts)

    def set_share(self, counts_LE: Tensor, tokens: int) -> None:
        """Record how the last global batch was routed (counts summed over micro-batches and processes)."""
        self.share_LE = (counts_LE.double() / tokens).float().cpu()
