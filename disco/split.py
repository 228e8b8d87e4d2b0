"""A full MoE to its submodels: the same Hugging Face class with one routed expert and top-k 1.

Submodel e computes what the full model computes when every token goes to expert e at weight 1.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from disco.artifacts import ArtifactError, read_json, write_json
from disco.checkpoint import (
    Checkpoint,
    Output,
    Stored,
    copy_side_files,
    identity,
    tokenizer_identity,
    write_model,
)
from disco.config import ConfigError
from disco.family import STAND_INS, num_experts, with_experts

NOTE = "submodel.json"
NEVER = -1e4  # correction of a stand-in's score, which is between 0 and 1: it is never chosen


class SubmodelNote(NamedTuple):
    """What a submodel was made from; it travels with the folder, and merge compares it."""

    base: str  # identity of the start that all submodels share
    expert: int
    of: int
    clustering: str
    tokenizer: str | None


def write_submodel_note(folder: Path, *, base: str, expert: int, experts: int, clustering: str) -> None:
    """Write `submodel.json`: submodel `expert` of `experts`, trained from the model whose `identity` is `base`.

    `clustering` names the cluster assignment (any string, the same for all submodels of a merge). The
    tokenizer's fingerprint is taken from the folder.
    """
    if not 0 <= expert < experts:
        raise ConfigError(f"submodel {expert} does not exist: there are {experts}, counted from 0")
    note = SubmodelNote(base, expert, experts, clustering, tokenizer_identity(folder))
    write_json(folder / NOTE, note._asdict())


def read_submodel_note(folder: Path) -> SubmodelNote:
    """Raises ArtifactError where the folder holds no (whole) note."""
    if not (folder / NOTE).is_file():
        raise ArtifactError(f"{folder}: has no {NOTE}: it is not a submodel of a split")
    raw = read_json(folder / NOTE)
    try:
        return SubmodelNote(**raw)
    except TypeError:
        raise ArtifactError(
            f"{folder / NOTE}: damaged: it needs the keys {', '.join(SubmodelNote._fields)}"
        ) from None


def split(
    full: Path, expert: int, out: Path, *, clustering: str = "", max_shard_bytes: int = 2_000_000_000
) -> None:
    """Write submodel `expert` of the model in `full` to the folder `out`, bit for bit and streamed.

    It keeps the expert's matrices, its row of each router, and the whole shared part. Raises ConfigError for
    an expert that does not exist, ArtifactError for a damaged checkpoint.
    """
    full, out = Path(full), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    source = Checkpoint.open(full)
    experts = num_experts(source.config)
    if not 0 <= expert < experts:
        raise ConfigError(f"submodel {expert} does not exist: the model has {experts} experts, from 0")
    config = with_experts(source.config, 1, 1)
    stand_ins = getattr(config, STAND_INS, 0)
    outputs = []
    for key, stored in source.tensors.items():
        role = source.family.role(key)
        if role.kind == "router":
            outputs.append(_router_rows(key, stored, expert, stand_ins))
        elif role.kind == "shared":
            outputs.append(Output.copy(key, stored))
        elif role.expert == expert:
            outputs.append(Output.copy(role.template.format(e=0), stored))
            for e in range(1, 1 + stand_ins):
                nothing = partial(stored.filled, 0.0)
                outputs.append(Output(role.template.format(e=e), stored.dtype, stored.shape, nothing))
    write_model(out, config, outputs, "a submodel", max_shard_bytes)
    copy_side_files(full, out)
    write_submodel_note(out, base=identity(full), expert=expert, experts=experts, clustering=clustering)


def _router_rows(key: str, stored: Stored, expert: int, stand_ins: int) -> Output:
    """The expert's row of a router's tensor, and rows of stand-ins that are never chosen."""

    def chunks() -> Iterator:
        yield from stored.row(expert).chunks()
        for _ in range(stand_ins):
            yield from stored.row(expert).filled(0.0 if len(stored.shape) > 1 else NEVER)

    return Output(key, stored.dtype, (1 + stand_ins, *stored.shape[1:]), chunks)
