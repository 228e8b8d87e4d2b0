"""The model that everything starts from: drawn from scratch by seed, or a checked copy of a checkpoint."""

import difflib
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from disco.artifacts import first_line
from disco.checkpoint import Checkpoint, copy_side_files, expected, load_config, write_model
from disco.config import ConfigError, Experiment
from disco.family import DENSE, FAMILIES, layout_of, num_experts, routed_like, top_k, with_experts
from disco.split import NOTE, split
from disco.tensor_files import NAME_OF, Output, as_bytes
from disco.upcycle import identical_experts, upcycle, upcycled_config

if TYPE_CHECKING:
    from disco.corpus import Corpus

# Keys of older config files that transformers turns into others, and one that models read though it is no field.
MORE_KEYS = ("rope_theta", "rope_scaling", "torch_dtype", "head_dim")
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


def model_config(raw: dict, tokenizer=None, dense: bool = False) -> PretrainedConfig:
    """The Hugging Face config of `model.config`; vocabulary size and token ids come from the tokenizer.
    `dense`: it describes a dense model that is to be upcycled.

    Raises ConfigError for a model_type that is no known family, a key that its config class does not have, a
    value of the wrong type, and sizes that do not fit each other.
    """
    raw = _numbers(raw)
    model_type = raw.pop("model_type", None)
    families = DENSE if dense else FAMILIES
    if not isinstance(model_type, str) or model_type not in families:
        kind = "dense families that can be upcycled" if dense else "known families"
        raise ConfigError(f"model.config.model_type is '{model_type}': {kind} are {', '.join(sorted(families))}")
    config_class = CONFIG_MAPPING[model_type]
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map, *config_class().to_dict(), *MORE_KEYS}
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"{config_class.__name__} has no such key"
            raise ConfigError(f"unknown key model.config.{key}: {hint}")
    if tokenizer is not None:
        raw.setdefault("vocab_size", len(tokenizer))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            raw.setdefault(name, getattr(tokenizer, name))
    try:
        config = config_class(**raw)
    except Exception as error:  # the strict config classes raise several kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"model.config: {' '.join(lines)}") from None
    _check_sizes(config)
    return config if dense else with_experts(config, num_experts(config), top_k(config))


def _numbers(value):
    """YAML reads 1e-6 and 1e6, which have no point, as text."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def _check_sizes(config: PretrainedConfig) -> None:
    for key, value in config.to_dict().items():
        counts = key.endswith(("_size", "_heads", "_layers")) or key.startswith("num_")
        if counts and isinstance(value, int) and value < 1:
            raise ConfigError(f"model.config.{key} is {value}: it has to be at least 1")
    heads, groups = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % groups:
        raise ConfigError(
            f"model.config.num_attention_heads is {heads}, no multiple of num_key_value_heads {groups}"
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise ConfigError(
            f"model.config.hidden_size is {config.hidden_size}, no multiple of num_attention_heads {heads}"
        )
    if width % 2:
        raise ConfigError(
            f"model.config: heads are {width} wide, rotary positions need an even width: "
            f"hidden_size / num_attention_heads is {config.hidden_size} / {heads}"
        )


def initial_model(config: Experiment, corpus: "Corpus | None", out: Path, single_expert: bool) -> None:
    """Write the model of section `model` to the folder `out`, with tokenizer and generation config.

    From scratch, weights depend on `config.seed` alone; with `single_expert` it is the full model's submodel 0,
    so that both versions begin with the same shared part. A source is verified key by key and copied in
    `model.dtype`. Raises ConfigError or ArtifactError.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if config.model.upcycle is not None:
        _upcycle(config, corpus, out, single_expert)
        return
    if config.model.source is not None:
        _copy_source(config, corpus, out, single_expert)
        return
    tokenizer = None if corpus is None else corpus.tokenizer()
    full = model_config(config.model.config, tokenizer)
    _check_vocabulary(full, tokenizer, "model.config.vocab_size")
    dtype = getattr(torch, config.model.dtype)
    if not single_expert:
        _draw(full, tokenizer, config.seed, dtype, out)
        return
    with tempfile.TemporaryDirectory(dir=out, prefix="full.") as folder:
        _draw(full, tokenizer, config.seed, dtype, Path(folder))
        split(Path(folder), 0, out)
    (out / NOTE).unlink()  # a start is no submodel


def _draw(config: PretrainedConfig, tokenizer, seed: int, dtype: torch.dtype, out: Path) -> None:
    """Draw weights in float32, so that every dtype starts from the same numbers, and save them in `dtype`."""
    family = layout_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    known = expected(config)
    outputs = []
    for key, tensor in model.state_dict().items():
        flat = tensor.reshape(-1).to(known.dtype(key, dtype))
        for piece in family.pieces(key, tensor.shape):
            if piece.key not in known.tied:
                part = flat[piece.start : piece.start + torch.Size(piece.shape).numel()]
                data = as_bytes(part)
                outputs.append(Output(piece.key, NAME_OF[part.dtype], piece.shape, lambda data=data: [data]))
    write_model(out, config, outputs, "the initial model")
    GenerationConfig.from_model_config(config).save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def _copy_source(config: Experiment, corpus: "Corpus | None", out: Path, single_expert: bool) -> None:
    folder = locate(config.model.source, config.model.revision)
    source = Checkpoint.open(folder)
    if single_expert and num_experts(source.config) > 1:
        raise ConfigError(
            f"seed_phase.model is submodel, but {folder} has {num_experts(source.config)} experts to keep: "
            "set seed_phase.model=full"
        )
    tokenizer = None if corpus is None else corpus.tokenizer()
    _check_vocabulary(source.config, tokenizer, f"{folder}: vocab_size")
    dtype = getattr(torch, config.model.dtype)
    known = expected(source.config)
    outputs = [Output.cast(key, stored, known.dtype(key, dtype)) for key, stored in source.tensors.items()]
    source.config.dtype = dtype
    write_model(out, source.config, outputs, "the initial model")
    copy_side_files(folder, out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def _upcycle(config: Experiment, corpus: "Corpus | None", out: Path, single_expert: bool) -> None:
    tokenizer = None if corpus is None else corpus.tokenizer()
    dtype = getattr(torch, config.model.dtype)
    with tempfile.TemporaryDirectory(dir=out, prefix="dense.") as temporary:
        if config.model.source is not None:
            folder = locate(config.model.source, config.model.revision)
            _check_vocabulary(load_config(folder), tokenizer, f"{folder}: vocab_size")
        else:
            folder = Path(temporary)
            dense = model_config(config.model.config, tokenizer, dense=True)
            _check_vocabulary(dense, tokenizer, "model.config.vocab_size")
            _draw(dense, tokenizer, config.seed, torch.float32, folder)
        upcycle(folder, out, config.model.upcycle, seed=config.seed, dtype=dtype, single_expert=single_expert)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def _check_vocabulary(config: PretrainedConfig, tokenizer, place: str) -> None:
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"{place} is {config.vocab_size} but the tokenizer has {len(tokenizer)} tokens: "
            "set it to at least that, or take the model's own tokenizer"
        )


def locate(source: str, revision: str | None = None) -> Path:
    """The folder of `model.source`: itself if it is one, else a snapshot from the Hugging Face hub."""
    if Path(source).is_dir():
        return Path(source)
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise ConfigError(f"model.source is '{source}': no such folder, and not a hub name (owner/name)")
    from huggingface_hub import snapshot_download  # only here, so that nothing else can reach the network

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # network, authentication, unknown name: the hub has many kinds
        raise ConfigError(
            f"model.source is '{source}': no such folder, and the hub did not give it: {first_line(error)}"
        ) from None


def described_model(config: Experiment) -> PretrainedConfig:
    """The Hugging Face config of the full MoE that section `model` describes."""
    dense = config.model.upcycle is not None
    if config.model.source is not None:
        found = load_config(locate(config.model.source, config.model.revision))
    else:
        raw = {"vocab_size": config.corpus.tokenizer.vocab_size} | config.model.config
        found = model_config(raw, dense=dense)
    if config.model.extend is not None:
        return with_experts(found, num_experts(found) + config.model.extend.experts, top_k(found))
    return upcycled_config(found, config.model.upcycle) if dense else found


def starts_single(config: Experiment) -> bool:
    """Whether the shared start is a single-expert model that every submodel begins from."""
    if config.model.upcycle is not None and identical_experts(config.model.upcycle):
        return not config.seed_phase.tokens or config.seed_phase.model != "full"
    return config.model.source is None and config.seed_phase.tokens > 0 and config.seed_phase.model != "full"


def full_config(config: Experiment, start: Path) -> PretrainedConfig:
    """Config of the merged model for a start folder that may have a single expert (`merge(full_config=...)`)."""
    return routed_like(load_config(Path(start)), described_model(config))
