"""Sharded experts of one layer: dispatch, unshard, compute, combine; and the same backwards.

Shapes: T tokens, K experts a token, E experts, N ranks, C slots, R rows received, S values a slice, H hidden width,
F expert width.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import Tensor, nn

from fsep import compute
from fsep.dispatch import Combine, Dispatch, make_flow
from fsep.link import in_backward
from fsep.norm import check_engine
from fsep.routing import route_copies
from fsep.runtime import Pass, Runtime, Ticket
from fsep.space import ExpertSpace
from fsep.weights import Resharding

# The name under which a state dict has a shard: with it DeepSpeed's checkpoints keep a file of each rank's.
SAVED = "deepspeed_moe.experts.deepspeed_experts.0."


class ShardedExperts(MoE):
    """Takes the place of the experts module of a Hugging Face MoE block: same arguments, same result.

    ``shard`` [E, S] holds this rank's slice of every expert (see ``fsep.space``). To DeepSpeed it is an expert
    parameter of group ``ep_size_<ranks>``, which it neither averages over ranks nor partitions; deriving from
    DeepSpeed's own class is how its engine knows.

    Numerics: the experts' outputs and the sums over tokens in their gradients are formed copy by copy and the
    copies added in fp32 from the lowest rank to the highest, so a run is reproducible bit for bit, and two runs
    with different layouts differ by rounding alone: within 1e-6 relative in fp32 (in bf16 each copy's partial
    gradient is rounded to bf16 before the sum).
    """

    def __init__(
        self,
        index: int,
        name: str,
        experts: int,
        space: ExpertSpace,
        act: Callable[[Tensor], Tensor],
        runtime: Runtime,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trainable: bool,
    ) -> None:
        nn.Module.__init__(self)  # not MoE's, which would build a gate and experts of its own
        ranks = runtime.tokens.size
        self.index, self.name, self.space, self.runtime = index, name, space, runtime  # index: among MoE layers
        self.num_experts = experts
        self.act_fn = act
        # DeepSpeed's names; to its checkpoints a rank's shard is one expert.
        self.ep_size, self.expert_group_name, self.num_local_experts = ranks, f"ep_size_{ranks}", 1
        self.shard = nn.Parameter(
            torch.zeros(experts, space.slice_size(ranks), dtype=dtype, device=device), requires_grad=trainable
        )
        self.shard.allreduce = False
        self.shard.group_name = self.expert_group_name
        self.loaded = False

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed's engine while it initialises: make its process groups, check its settings."""
        check_engine(inspect.currentframe().f_back.f_locals.get("self"))
        if self.expert_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(
                self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
            )

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + SAVED + "shard"] = self.shard if keep_vars else self.shard.detach()
        destination[prefix + SAVED + "slice"] = torch.tensor([self.runtime.tokens.rank, self.ep_size])

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        shard, saved = (state_dict.get(prefix + SAVED + name) for name in ("shard", "slice"))
        rank, ranks = self.runtime.tokens.rank, self.ep_size
        if shard is None or saved is None:
            missing.append(prefix + SAVED + "shard")
        elif saved.tolist() != [rank, ranks]:
            errors.append(
                f"{self.name}: the state has slice {saved[0]} of {saved[1]}, this is rank {rank} of {ranks}: "
                "use fsep.save_checkpoint and fsep.load_checkpoint"
            )
        elif shard.shape != self.shard.shape:
            errors.append(f"{self.name}: the state has shape {shard.shape}, the model {self.shard.shape}")
        else:
            self.shard.data.copy_(shard)
            self.loaded = True

    def forward(self, hidden_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The experts' weighted sum [T, H]; a collective call, T may differ between ranks and be zero.

        Args:
            hidden_TH: this rank's tokens.
            chosen_TK: expert numbers of each token.
            weight_TK: what each chosen expert's output is multiplied by.

        Raises:
            RuntimeError: no weights were loaded, ranks with different layouts, or ``RankError``: a rank is gone.
        """
        if not self.loaded:
            raise RuntimeError(f"{self.name} holds no weights: call fsep.load_pretrained(model, folder) first")
        run, recomputing = self.runtime, in_backward()
        if self.index == 0 and not recomputing:
            run.begin(self.training)
        step = run.current
        load_NE = run.gather_load(self, chosen_TK, step)
        token, ticket = step.take_ticket(self.index) if torch.is_grad_enabled() else (None, None)
        run.start(step, self.index)
        started = time.perf_counter()
        layout = step.layouts[self.index]
        tokens_NP = route_copies(load_NE, layout, run.topology)
        if not recomputing:
            run.record(self.index, load_NE, tokens_NP, layout, time.perf_counter() - started)
        flow = make_flow(chosen_TK, tokens_NP, layout.copies, run.tokens.rank)
        x_RH = Dispatch.apply(hidden_TH.to(self.shard.dtype), flow, run.tokens, self.name)
        if not recomputing and run.delay_reshard and torch.is_grad_enabled():
            # Made before this layer's compute, so that backward comes to it after this layer's compute.
            step.prepare(self.index + 1)
        y_RH = Compute.apply(x_RH, token, self, step, flow.slot_rows, ticket)
        y_PH = Combine.apply(y_RH, flow, run.tokens, self.name)
        y_TKH = y_PH.view(*chosen_TK.shape, y_PH.shape[1])
        return (y_TKH * weight_TK[..., None]).sum(1).to(hidden_TH.dtype)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, ranks={self.ep_size}, slots={self.runtime.slots}"


class Compute(torch.autograd.Function):
    """The experts this rank holds, on the rows [R, H] sent to it. Rebuilt weights live only inside.

    Saves the rows and their inner products, not the weights, which backward rebuilds. The weights' gradient leaves
    by ``ticket``.
    """

    @staticmethod
    def forward(ctx, x_RH, token, layer: ShardedExperts, step: Pass, slot_rows: list[int], ticket: Ticket | None):
        run, again = layer.runtime, in_backward()
        run.prefetch(step, layer.index, -1 if again else 1)
        key = step.key(layer.index)
        flat = run.rebuilder.take(key)
        y_RH, up_R2F = compute.forward(x_RH, flat, slot_rows, layer.space, layer.act_fn)
        if again:  # recomputed for the backward that follows at once
            run.rebuilder.hold(key, flat)
        else:
            run.rebuilder.free(flat)
            step.open += any(ctx.needs_input_grad)
        ctx.save_for_backward(x_RH, up_R2F)
        ctx.layer, ctx.step, ctx.slot_rows, ctx.ticket = layer, step, slot_rows, ticket
        return y_RH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RH: Tensor):
        layer, step = ctx.layer, ctx.step
        run = layer.runtime
        x_RH, up_R2F = ctx.saved_tensors
        step.open = max(0, step.open - 1)
        run.start(step, layer.index)
        run.prefetch(step, layer.index, -1)
        flat = run.rebuilder.take(step.key(layer.index))
        grads = torch.empty_like(flat) if ctx.ticket is not None else None
        if grads is not None:
            run.gradients.add(grads.numel())
        grad_x_RH = compute.backward(
            grad_RH.contiguous(), x_RH, up_R2F, flat, ctx.slot_rows, layer.space, layer.act_fn, grads
        )
        run.rebuilder.free(flat)
        del flat
        if grads is None:
            return grad_x_RH, None, None, None, None, None
        grads = grads.unflatten(1, (run.weights.size, -1))
        ctx.ticket.resharding = Resharding(
            run.weights, run.gradients, grads, step.placements[layer.index], layer.name
        )
        return grad_x_RH, grads.new_zeros(()), None, None, None, None


def expert_layers(model: nn.Module) -> list[ShardedExperts]:
    """The sharded layers of a model, front to back; none where it has none."""
    layers = [module for module in model.modules() if isinstance(module, ShardedExperts)]
    return sorted(layers, key=lambda layer: layer.index)
