"""A full MoE to its submodels: the same Hugging Face class with one routed expert and top-k 1.

Submodel e computes what the full model computes when every token goes to expert e at weight 1. Where there are
fewer submodels than experts, each has a group of experts and their rows of the router.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from disco.artifacts import ArtifactError, read_json, write_json
from disco.checkpoint import Checkpoint, copy_side_files, identity, tokenizer_identity, write_model
from disco.config import ConfigError
from disco.family import STAND_INS, as_submodel, num_experts
from disco.tensor_files import Output, Stored

NOTE = "submodel.json"
NEVER = -1e4  # correction of a stand-in's score, which is between 0 and 1: it is never chosen


class SubmodelNote(NamedTuple):
    """What a submodel was made from; it travels with the folder, and merge compares it."""

    base: str  # identity of the start that all submodels share
    expert: int  # number of the submodel
    of: int
    clustering: str
    tokenizer: str | None
    group: list[int]  # the experts of the full model that it stands for


def write_submodel_note(
    folder: Path, *, base: str, expert: int, experts: int, clustering: str, group: list[int] | None = None
) -> None:
    """Write `submodel.json`: submodel `expert` of `experts`, trained from the model whose `identity` is `base`.

    `clustering` names the cluster assignment (any string, the same for all submodels of a merge). `group`: the
    experts of the full model that it stands for, [expert] if absent. The tokenizer's fingerprint is taken from
    the folder.
    """
    if not 0 <= expert < experts:
        raise ConfigError(f"submodel {expert} does not exist: there are {experts}, counted from 0")
    group = [expert] if group is None else group
    note = SubmodelNote(base, expert, experts, clustering, tokenizer_identity(folder), group)
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


def groups_of(experts: int, submodels: int) -> list[list[int]]:
    """Consecutive experts in groups as equal as can be, one a submodel.

    Raises ConfigError where there are more submodels than experts.
    """
    if not 1 <= submodels <= experts:
        raise ConfigError(f"cluster.k is {submodels} but the model has {experts} experts: set it to 1..{experts}")
    return [part.tolist() for part in np.array_split(np.arange(experts), submodels)]


def split(
    full: Path,
    expert: int,
    out: Path,
    *,
    submodels: int | None = None,
    renormalize: bool | None = None,
    clustering: str = "",
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write submodel `expert` of the model in `full` to the folder `out`, bit for bit and streamed.

    It keeps the expert's matrices, its row of each router, and the whole shared part. With fewer `submodels`
    than experts it keeps a group of them (`groups_of`) and their rows, and top-k in proportion; `renormalize` is
    then the norm_topk_prob of the submodel (absent: the model's own). Raises ConfigError for a submodel that does
    not exist, ArtifactError for a damaged checkpoint.
    """
    full, out = Path(full), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    source = Checkpoint.open(full)
    experts = num_experts(source.config)
    groups = groups_of(experts, experts if submodels is None else submodels)
    if not 0 <= expert < len(groups):
        many = f"{experts} experts" if submodels is None else f"{submodels} submodels"
        raise ConfigError(f"submodel {expert} does not exist: the model has {many}, from 0")
    group = groups[expert]
    config = as_submodel(source.config, len(group), renormalize)
    stand_ins = getattr(config, STAND_INS, 0)
    outputs = []
    for key, stored in source.tensors.items():
        role = source.family.role(key)
        if role.kind == "router":
            outputs.append(_router_rows(key, stored, group, stand_ins))
        elif role.kind == "shared":
            outputs.append(Output.copy(key, stored))
        elif role.expert in group:
            outputs.append(Output.copy(role.template.format(e=group.index(role.expert)), stored))
            for e in range(1, 1 + stand_ins):
                nothing = partial(stored.filled, 0.0)
                outputs.append(Output(role.template.format(e=e), stored.dtype, stored.shape, nothing))
    write_model(out, config, outputs, "a submodel", max_shard_bytes)
    copy_side_files(full, out)
    write_submodel_note(
        out, base=identity(full), expert=expert, experts=len(groups), clustering=clustering, group=group
    )


def _router_rows(key: str, stored: Stored, group: list[int], stand_ins: int) -> Output:
    """The experts' rows of a router's tensor, and rows of stand-ins that are never chosen."""

    def chunks() -> Iterator:
        for expert in group:
            yield from stored.row(expert).chunks()
        for _ in range(stand_ins):
            yield from stored.row(0).filled(0.0 if len(stored.shape) > 1 else NEVER)

    return Output(key, stored.dtype, (len(group) + stand_ins, *stored.shape[1:]), chunks)
