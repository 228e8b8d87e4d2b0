"""Partition of a model's trainable parameters into blocks.

A block is a list of pieces; a piece is a whole parameter or a range of its rows (dimension 0). Every
trainable parameter lies in exactly one block or in the always-on set, parameters frozen by the user in none.

Only names and shapes are read, so a model on the meta device serves as well as a real one.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Piece:
    """A parameter, or its rows ``start <= row < stop`` of dimension 0 when `rows` is given."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        count = math.prod(self.shape)
        return count if self.rows is None else count // self.shape[0] * (self.rows[1] - self.rows[0])

    @property
    def key(self) -> str:
        """Name that identifies the piece within the model, e.g. ``lm_head.weight[0:1000]``."""
        return self.name if self.rows is None else f"{self.name}[{self.rows[0]}:{self.rows[1]}]"


@dataclass(frozen=True)
class Block:
    """Pieces that are trained together. `depth` is 0 for embeddings, i + 1 for decoder layer i, and one
    more than the number of layers for the head; a block of several depths has the lowest."""

    name: str
    depth: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True)
class Partition:
    """Blocks in the order of the forward pass, and the pieces that train in every block."""

    blocks: tuple[Block, ...]
    always_on: tuple[Piece, ...]
    layers: str  # dotted name of the list of decoder layers, "" if there is none
    layer_count: int

    @property
    def digest(self) -> str:
        """sha256 over names, rows and shapes: equal for equal partitions."""
        content = [
            [(block.name, [(p.key, p.shape) for p in block.pieces]) for block in self.blocks],
            [(p.key, p.shape) for p in self.always_on],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def matches(pattern: str, name: str) -> bool:
    """True if glob `pattern` names parameter `name` or a module above it.

    ``model.layers.1`` takes layer 1 and not layer 10; ``*norm*`` takes every name that contains norm.
    """
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of a parameter before ZeRO-3 took it apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def decoder_layers(model: nn.Module) -> str:
    """Dotted name of the module list that holds most parameters and lies in no other list ("" if none)."""
    best, most, taken = "", 0, []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in taken):
            continue
        taken.append(name)
        count = sum(math.prod(full_shape(p)) for p in module.parameters())
        if count > most:
            best, most = name, count
    return best


def depths(model: nn.Module, layers: str) -> dict[str, int]:
    """Depth of every parameter: 0 before the decoder layers in registration order, i + 1 in layer i, and
    layer count + 1 after them. Without decoder layers all are 0."""
    count = len(model.get_submodule(layers)) if layers else 0
    result, seen_layers = {}, False
    for name, _ in model.named_parameters():
        if layers and name.startswith(f"{layers}."):
            seen_layers = True
            result[name] = int(name[len(layers) + 1 :].split(".")[0]) + 1
        else:
            result[name] = count + 1 if seen_layers else 0
    return result


def partition(
    model: nn.Module,
    granularity: str | Sequence[str] | Mapping[str, Sequence[str]] = "layer",
    *,
    always_on: Sequence[str] = (),
    expert_groups: int = 1,
    max_block_gb: float | None = None,
    bytes_per_parameter: int = 14,
) -> Partition:
    """Cut the trainable parameters of `model` into blocks.

    Parameters
    ----------
    granularity
        ``"layer"``: embeddings, each decoder layer, head (final norm and output). A layer with experts
        gives two kinds of blocks: its dense part with the router, and its experts.
        ``"module"``: the same with a layer cut into its children (attention, MLP); norms go with the first.
        A sequence of patterns (each its own block) or a mapping from block name to patterns: see `matches`.
    always_on
        Patterns of parameters that train in every block.
    expert_groups
        Blocks that the experts of a layer are cut into (rows of a packed [E, ...] parameter).
    max_block_gb
        Largest training state of a block in GB (1e9 bytes), before any sharding. Larger blocks are cut,
        single parameters by rows.
    bytes_per_parameter
        Gradient, master weight and AdamW moments: 14 in bf16 or fp16, 12 in fp32.

    Raises
    ------
    ValueError
        A pattern without a trainable match, a parameter in two blocks or in none, a row larger than
        `max_block_gb`, no trainable parameter.
    """
    shapes = {name: full_shape(p) for name, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        raise ValueError("the model has no trainable parameter: set requires_grad=True on what shall be trained")
    if expert_groups < 1:
        raise ValueError(f"expert_groups is {expert_groups}: it must be at least 1")
    layers = decoder_layers(model)
    depth = depths(model, layers)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}

    on = {name for pattern in always_on for name in _matching(pattern, shapes, frozen, "always_on")}
    rest = {name: shape for name, shape in shapes.items() if name not in on}
    if not rest:
        raise ValueError("always_on covers every trainable parameter: nothing is left to switch between")

    if granularity == "layer" or granularity == "module":
        named = _by_architecture(rest, depth, layers, granularity, expert_groups)
    elif isinstance(granularity, str):
        raise ValueError(f"granularity is {granularity!r}: use 'layer', 'module', or a list or mapping of patterns")
    else:
        named = _by_patterns(shapes, rest, frozen, granularity)

    blocks = [Block(name, min(depth[p.name] for p in pieces), tuple(pieces)) for name, pieces in named.items()]
    if max_block_gb is not None:
        limit = int(max_block_gb * 1e9 / bytes_per_parameter)
        blocks = [part for block in blocks for part in _cut(block, limit, max_block_gb)]
    layer_count = len(model.get_submodule(layers)) if layers else 0
    return Partition(tuple(blocks), tuple(Piece(n, shapes[n]) for n in shapes if n in on), layers, layer_count)


def _matching(pattern: str, shapes: Mapping[str, tuple], frozen: set[str], where: str) -> list[str]:
    found = [name for name in shapes if matches(pattern, name)]
    if not found:
        if any(matches(pattern, name) for name in frozen):
            raise ValueError(f"{where} pattern {pattern!r} matches only frozen parameters: set requires_grad=True")
        raise ValueError(f"{where} pattern {pattern!r} matches no parameter; there is e.g. {next(iter(shapes))!r}")
    return found


def _by_patterns(
    shapes: Mapping[str, tuple],
    rest: Mapping[str, tuple],
    frozen: set[str],
    granularity: Sequence[str] | Mapping[str, Sequence[str]],
) -> dict[str, list[Piece]]:
    groups = granularity if isinstance(granularity, Mapping) else {pattern: [pattern] for pattern in granularity}
    if not isinstance(granularity, Mapping) and len(groups) < len(granularity):
        raise ValueError("granularity names a pattern twice: each pattern is a block of its own")
    owner: dict[str, str] = {}
    blocks: dict[str, list[Piece]] = {}
    for block, patterns in groups.items():
        patterns = [patterns] if isinstance(patterns, str) else patterns
        names = {name for pattern in patterns for name in _matching(pattern, shapes, frozen, "granularity")}
        for name in names & rest.keys():
            if name in owner:
                raise ValueError(f"parameter {name!r} is in blocks {owner[name]!r} and {block!r}: keep it in one")
            owner[name] = block
        blocks[block] = [Piece(name, shape) for name, shape in rest.items() if name in names]
        if not blocks[block]:
            raise ValueError(f"block {block!r} is empty: always_on takes all that its patterns match")
    missing = [name for name in rest if name not in owner]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"no pattern covers parameter {missing[0]!r}{more}: add a pattern, or freeze them")
    return blocks


def _by_architecture(
    rest: Mapping[str, tuple], depth: Mapping[str, int], layers: str, granularity: str, expert_groups: int
) -> dict[str, list[Piece]]:
    last = max(depth.values())
    wide: dict[str, list[str]] = defaultdict(list)  # layer index -> children that hold a matrix, in order
    for name, shape in rest.items():
        path = name[len(layers) + 1 :].split(".") if layers and name.startswith(f"{layers}.") else ()
        if path and len(shape) > 1 and "experts" not in path[:-1] and path[1] not in wide[path[0]]:
            wide[path[0]].append(path[1])
    experts_in = {depth[name] for name in rest if "experts" in name.split(".")[:-1]}
    blocks: dict[str, list[Piece]] = {}
    for name in sorted(rest, key=depth.__getitem__):  # stable: registration order within a depth
        shape, d = rest[name], depth[name]
        if not (layers and name.startswith(f"{layers}.")):
            block = "embeddings" if d == 0 else "head"
            blocks.setdefault(block if last else "all", []).append(Piece(name, shape))
            continue
        path = name[len(layers) + 1 :].split(".")
        base = f"layers.{path[0]}"
        if "experts" in path[:-1]:
            for group, piece in _expert_pieces(name, shape, path, expert_groups):
                suffix = f".{group}" if expert_groups > 1 else ""
                blocks.setdefault(f"{base}.experts{suffix}", []).append(piece)
        elif granularity == "module":
            # Vectors (norms) are no block of their own: they go with the first child that has a matrix.
            child = path[1] if path[1] in wide[path[0]] else next(iter(wide[path[0]]), path[1])
            blocks.setdefault(f"{base}.{child}", []).append(Piece(name, shape))
        else:
            blocks.setdefault(f"{base}.dense" if d in experts_in else base, []).append(Piece(name, shape))
    return blocks


def _expert_pieces(name: str, shape: tuple[int, ...], path: list[str], groups: int) -> list[tuple[int, Piece]]:
    """(group, piece) of one expert parameter: rows of a packed one, whole if experts are a module list."""
    after = path[path.index("experts") + 1]
    if after.isdigit():
        if groups > 1:
            raise ValueError(
                f"expert_groups is {groups} but {name!r} is not packed: name groups by patterns instead"
            )
        return [(0, Piece(name, shape))]
    if groups > shape[0]:
        raise ValueError(f"expert_groups is {groups} but {name!r} has {shape[0]} experts: use at most that many")
    if groups == 1:
        return [(0, Piece(name, shape))]
    bounds = [shape[0] * g // groups for g in range(groups + 1)]
    return [(g, Piece(name, shape, (bounds[g], bounds[g + 1]))) for g in range(groups)]


def _cut(block: Block, limit: int, gb: float) -> list[Block]:
    """Blocks of at most `limit` elements: pieces packed in order, larger pieces cut into equal row ranges."""
    if block.numel <= limit:
        return [block]
    bins: list[list[Piece]] = [[]]
    for piece in block.pieces:
        for part in _rows(piece, limit, gb):
            if bins[-1] and sum(p.numel for p in bins[-1]) + part.numel > limit:
                bins.append([])
            bins[-1].append(part)
    return [Block(f"{block.name}.part{i}", block.depth, tuple(pieces)) for i, pieces in enumerate(bins)]


def _rows(piece: Piece, limit: int, gb: float) -> list[Piece]:
    if piece.numel <= limit:
        return [piece]
    start, stop = piece.rows or (0, piece.shape[0])
    per_part = limit // (piece.numel // (stop - start))
    if per_part == 0:
        raise ValueError(f"max_block_gb is {gb} but one row of {piece.name!r} {piece.shape} needs more: raise it")
    parts = math.ceil((stop - start) / per_part)
    bounds = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return [Piece(piece.name, piece.shape, (bounds[i], bounds[i + 1])) for i in range(parts)]


def row_view(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The rows of `tensor` that `piece` names (a view; the whole tensor for a whole parameter)."""
    return tensor if piece.rows is None else tensor[piece.rows[0] : piece.rows[1]]
