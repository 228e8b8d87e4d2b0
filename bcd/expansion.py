"""Updates of the layers above the active block, with almost no state (in the spirit of BREAD).

Backward passes through these layers anyway; one matrix product more a weight gives its gradient, which is
used and freed at once, so there is never more than one of them. A gradient is divided by the root of its
second moment, of which only the means over rows and over columns are kept (Adafactor: Shazeer and Stern 2018,
arXiv 1804.04235), without momentum. With several processes each gradient is averaged over them first, so that
all make the same update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import distributed, nn

from bcd.blocks import Block, Partition, matches
from bcd.config import Config

STATISTICS_BETA = 0.99  # of the running means of squared gradients
TINY = 1e-30


def above(partition: Partition, blocks: Iterable[int], depth: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Those of `names` that lie above the lowest active parameter and are not active themselves."""
    active = [*partition.always_on, *(piece for i in blocks for piece in partition.blocks[i].pieces)]
    lowest, taken = min(depth[piece.name] for piece in active), {piece.name for piece in active}
    return [name for name in names if depth[name] > lowest and name not in taken]


def divide(
    partition: Partition, blocks: Iterable[int], depth: Mapping[str, int], names: Iterable[str], config: Config
) -> tuple[list[Block], list[str]]:
    """Active blocks with the pieces that AdamW trains, and those of `names` that the expansion updates.

    With `expansion.active` ``factored`` the latter takes the active blocks' matrices, but for those that are cut
    by rows. ValueError if that leaves AdamW nothing.
    """
    chosen = [partition.blocks[i] for i in blocks]
    if config.expansion is None:
        return chosen, []
    names = list(names)
    expanded = set(above(partition, blocks, depth, names))
    if config.expansion.active == "factored":
        own = {p.name for block in chosen for p in block.pieces if len(p.shape) > 1 and p.rows is None}
        chosen = [replace(block, pieces=tuple(p for p in block.pieces if p.name not in own)) for block in chosen]
        if not any(block.pieces for block in chosen) and not partition.always_on:
            raise ValueError(
                f"expansion.active is 'factored', which leaves AdamW nothing of block {chosen[0].name!r}: set "
                "always_on, e.g. to the final norm"
            )
        expanded |= own
    return chosen, [name for name in names if name in expanded]


def statistics(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes of the running means kept for a parameter: rows and columns of (each of) its matrices; the
    squares themselves for a vector."""
    if len(shape) < 2:
        return [tuple(shape)]
    return [tuple(shape[:-1]), (*shape[:-2], shape[-1])]


class Expansion:
    """Moves a parameter by ``lr * lr_ratio`` times its normalised gradient, whose root mean square is at most 1.

    Where the active blocks are updated in this way too, the parameters named `whole` move by ``lr`` times theirs.
    """

    def __init__(self, backend, config: Config, whole: Iterable[str] = ()):
        if backend.stage == 3:
            raise ValueError(
                "expansion with zero_optimization.stage 3: a rank holds a whole weight only while its layer "
                "computes, and the update comes after that: use stage 0, 1 or 2, or drop expansion"
            )
        if backend.half:
            raise ValueError("expansion with fp16: its rounding of small updates is for bf16, use bf16 or fp32")
        self.config, self._world = config, backend.world_size
        self.names: list[str] = []
        self.state: dict[str, list[torch.Tensor]] = {}  # running means, then the number of updates
        self._named = dict(backend.module.named_parameters())
        self._handles: list = []
        self._rate = 0.0
        self._whole = frozenset(whole if config.expansion.active == "factored" else ())

    def attach(self, names: Sequence[str]) -> None:
        """Update the parameters of these names from now on, and no others."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.names = list(names)

    def enable(self, boundary: bool, rate: float, step: int) -> None:
        """Before a forward pass: gradients are made at accumulation boundaries only. `step` seeds the
        rounding, so that a resumed run rounds alike."""
        names = self.names
        self.attach(names)
        for name in names:
            self._named[name].requires_grad_(boundary)
        if not boundary or not names:
            return
        self._rate = rate
        self._generator = torch.Generator(self._named[names[0]].device).manual_seed(
            1_000_003 * self.config.seed + step
        )
        for name in names:
            hook = lambda parameter, name=name: self._update(name, parameter)  # noqa: E731
            self._handles.append(self._named[name].register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def _update(self, name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        parameter.requires_grad_(False)  # or DeepSpeed at ZeRO-0 makes it a gradient of zeros, to be reduced
        if self._world > 1:
            distributed.all_reduce(gradient)
            gradient.div_(self._world)
        update = self._normalise(name, gradient.float())
        if update is None:
            return
        exempt = any(matches(pattern, name) for pattern in self.config.no_decay)
        rate = self._rate * (1.0 if name in self._whole else self.config.expansion.lr_ratio)
        keep = 1.0 - rate * (0.0 if exempt else self.config.weight_decay)
        if parameter.dtype == torch.float32:
            parameter.mul_(keep).sub_(update, alpha=rate)
            return
        # Rounded to the nearest, small steps of bf16 weights would all be lost.
        exact = parameter.float().mul_(keep).sub_(update, alpha=rate)
        parameter.copy_(_round_at_random(exact, self._generator))

    def _normalise(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """`gradient` (overwritten) over the root of its factored second moment; None if it is not finite."""
        if gradient.ndim < 2:
            squares = [gradient.square()]
        else:
            squares = [
                torch.linalg.vector_norm(gradient, dim=dim).square_().div_(gradient.shape[dim]) for dim in (-1, -2)
            ]
        if not torch.isfinite(squares[0].sum()):
            return None
        if name not in self.state:
            shapes = statistics(gradient.shape)
            self.state[name] = [torch.zeros(shape, device=gradient.device) for shape in shapes]
            self.state[name].append(torch.zeros((), device=gradient.device))
        *means, count = self.state[name]
        count += 1
        correction = 1.0 - STATISTICS_BETA**count
        for mean, square in zip(means, squares, strict=True):
            mean.lerp_(square, 1.0 - STATISTICS_BETA)
        if gradient.ndim < 2:
            gradient.mul_((means[0] / correction + TINY).rsqrt_())
        else:
            rows, columns = means
            share = rows / (rows.mean(-1, keepdim=True) + TINY)
            # An all-zero row or column has a gradient of zero: any scale leaves it there.
            gradient.mul_((share + TINY).rsqrt_().unsqueeze(-1))
            gradient.mul_((columns / correction + TINY).rsqrt_().unsqueeze(-2))
        size = torch.linalg.vector_norm(gradient) / gradient.numel() ** 0.5
        return gradient.div_(size.clamp_(min=1.0))


def _round_at_random(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, up or down with the probability that keeps the mean."""
    noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits = noise.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)
