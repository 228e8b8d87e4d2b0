"""LLaMA-MoE v1 checkpoints (arXiv 2406.16554), which are remote code that transformers 5 cannot run, to Mixtral.

Experts and shared part are those of Mixtral; the factor that LLaMA-MoE multiplies its experts' output with goes
into their down-projections. Its gate, two layers with a tanh between, is not expressible as Mixtral's: router rows
are drawn at random and have to be fitted or trained, as a merge does anyway.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, MixtralConfig

from disco.artifacts import ArtifactError, read_json
from disco.checkpoint import ROTARY, copy_side_files, write_model
from disco.tensor_files import FLOATS, Output, Stored, as_bytes, as_tensor, seeded, stored_tensors

EXPERT = re.compile(
    r"^(?P<layer>model\.layers\.\d+)\.mlp\.calculator\.experts\.weight_(?P<part>gate|up|down)\.(?P<expert>\d+)$"
)
GATE = re.compile(r"^model\.layers\.\d+\.mlp\.gate\.")
PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def convert_llama_moe(source: Path, out: Path, *, seed: int = 0) -> None:
    """Write the LLaMA-MoE v1 checkpoint in `source` to `out` as Mixtral, streamed, in its own dtype.

    Raises ArtifactError where the folder is no such checkpoint, its experts differ in width, or a tensor is
    missing or has no place in Mixtral.
    """
    source, out = Path(source), Path(out)
    raw = read_json(source / "config.json") if (source / "config.json").is_file() else {}
    if raw.get("model_type") != "llama_moe" or "num_experts" not in raw or "num_selects" not in raw:
        raise ArtifactError(f"{source}: is no LLaMA-MoE v1 checkpoint: config.json has no model_type llama_moe")
    tensors = {
        key: stored
        for key, stored in stored_tensors(source).items()
        if not GATE.match(key) and not re.search(ROTARY, key)
    }
    widths = {stored.shape[0] for key, stored in tensors.items() if EXPERT.match(key) and "weight_down" not in key}
    if len(widths) != 1:
        raise ArtifactError(f"{source}: experts are {sorted(widths)} wide: Mixtral needs experts of one width")
    config = _config(raw, widths.pop(), tensors["model.embed_tokens.weight"])
    scales = raw.get("score_scale_factor", 1.0)
    outputs = []
    for key, stored in tensors.items():
        if not (found := EXPERT.match(key)):
            outputs.append(Output.copy(key, stored))
            continue
        block = f"{found['layer']}.block_sparse_moe"
        name = f"{block}.experts.{found['expert']}.{PARTS[found['part']]}.weight"
        if found["part"] == "down":
            layer = int(found["layer"].rpartition(".")[2])
            scale = scales[layer] if isinstance(scales, list) else scales
            outputs.append(Output(name, stored.dtype, stored.shape, partial(_scaled, stored, scale)))
        else:
            outputs.append(Output.copy(name, stored))
        if found["part"] == "gate" and found["expert"] == "0":
            shape = (config.num_local_experts, config.hidden_size)
            rows = torch.randn(shape, generator=seeded(seed, block)) * config.initializer_range
            data = as_bytes(rows.to(FLOATS[stored.dtype]))
            outputs.append(Output(f"{block}.gate.weight", stored.dtype, shape, lambda data=data: [data]))
    out.mkdir(parents=True, exist_ok=True)
    write_model(out, config, outputs, f"the model of {source}")
    copy_side_files(source, out)


def _config(raw: dict, width: int, embedding: Stored) -> MixtralConfig:
    """What Mixtral has of a Llama config, and the experts."""
    known = {*LlamaConfig.__dataclass_fields__, "rope_theta", "rope_scaling"}
    llama = LlamaConfig(**{key: value for key, value in raw.items() if key in known}).to_dict()
    kept = {key: value for key, value in llama.items() if key in MixtralConfig.__dataclass_fields__}
    own = {
        "architectures": ["MixtralForCausalLM"],
        "dtype": FLOATS[embedding.dtype],
        "intermediate_size": width,
        "num_local_experts": raw["num_experts"],
        "num_experts_per_tok": raw["num_selects"],
        "sliding_window": None,
    }
    return MixtralConfig(**(kept | own))


def _scaled(stored: Stored, scale: float) -> Iterator[memoryview]:
    for chunk in stored.chunks():
        values = as_tensor(chunk, stored.dtype)
        yield as_bytes((values.double() * scale).to(values.dtype))
