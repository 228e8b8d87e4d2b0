"""A full MoE to its submodels: the same Hugging Face class with one routed expert and top-k 1.

Submodel e computes what the full model computes when every token goes to expert e at weight 1.
"""

from pathlib import Path
from typing import NamedTuple

from disco.artifacts import ArtifactError, need_disk, read_json, write_json
from disco.checkpoint import Checkpoint, Output, copy_side_files, identity, tokenizer_identity, write_weights
from disco.config import ConfigError
from disco.family import num_experts, with_experts

NOTE = "submodel.json"


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
    outputs = []
    for key, stored in source.tensors.items():
        role = source.family.role(key)
        if role.kind == "router":
            outputs.append(Output.copy(key, stored.row(expert)))
        elif role.kind == "shared":
            outputs.append(Output.copy(key, stored))
        elif role.expert == expert:
            outputs.append(Output.copy(role.template.format(e=0), stored))
    need_disk(out, sum(output.bytes for output in outputs), "a submodel")
    write_weights(out, outputs, max_shard_bytes)
    with_experts(source.config, 1, 1).save_pretrained(out)
    copy_side_files(full, out)
    write_submodel_note(out, base=identity(full), expert=expert, experts=experts, clustering=clustering)
