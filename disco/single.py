"""One model by itself: train any known causal language model, dense or MoE, on text (`bcd train`).

    prepare > initial > train > evaluate

An experiment file with the sections below; stages, loop, ledger and tracking are those of the pipeline.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, GenerationConfig

from disco import artifacts, evaluate, pipeline
from disco.check import check_optimizer
from disco.checkpoint import load_config
from disco.config import ConfigError, Experiment, closest
from disco.corpus import Corpus, prepare
from disco.descent import blocks_of, with_stay
from disco.engine import load_model
from disco.family import DENSE, FAMILIES
from disco.overrides import joined
from disco.packing import pack
from disco.sources import check_sources
from disco.stages import Stage, dump, source_files, training
from disco.start import locate, model_config
from disco.tokenizer import check_tokenizer
from disco.train import budget, curve_rows, mixed_rows, price_of, run_training, updates
from launch.flops import layers
from launch.ledger import phase_of, read, totals

SECTIONS = (
    "name", "seed", "runs", "model", "corpus", "train", "bcd", "evaluate", "tracking", "hardware", "launch",
)  # fmt: skip


def load(path: Path, overrides: list[str]) -> Experiment:
    """The experiment of a file that describes one model. Raises ConfigError, also for the pipeline's sections."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    overrides = [*joined(overrides)]
    given = [*(raw if isinstance(raw, dict) else ()), *(text.split(".")[0].split("=")[0] for text in overrides)]
    for name in given:
        if name not in SECTIONS:
            raise ConfigError(f"{path}: unknown key {name} where one model is trained: {closest(name, SECTIONS)}")
    train = raw.get("train") if isinstance(raw, dict) else None
    said = isinstance(train, dict) and "mode" in train
    whole = [] if said else ["train.mode=full"]  # what the pipeline would leave frozen is trained here
    config = Experiment.load(path, [*whole, *overrides])
    if config.train.mode == "expert":
        raise ConfigError("train.mode is 'expert' but one whole model is trained: set train.mode=full or bcd")
    if config.model.upcycle is not None:
        raise ConfigError("model.upcycle makes an MoE for the pipeline (disco run): leave it out")
    return config


def run(config: Experiment, say: Callable[[str], None] = print) -> None:
    """Make every stage that is stale or missing, and say how good the model is and what it cost."""
    check(config)
    with artifacts.lock(config.folder):
        (config.folder / "experiment.yaml").write_text(config.dump(), encoding="utf-8")
        pipeline.make_stale(config, stages(config), set(), say)
    results = artifacts.read_json(config.folder / "evaluate" / evaluate.RESULTS)
    for name, entry in results["models"].items():
        say(f"{name}: held-out cross-entropy {entry['cross_entropy']:.4f}, perplexity {entry['perplexity']:.4g}")
    bill = totals(read(config.folder / "ledger.jsonl"), phase_of)["train"]
    say(
        f"{config.train.optimizer}: {bill.tokens:,} tokens, {bill.flops:.3g} FLOPs, {bill.device_seconds:.1f} "
        f"device seconds, ${bill.dollars:.4f} as {config.hardware.train} ({', '.join(sorted(bill.kinds))})"
    )
    say(f"model: {config.folder / 'train'}")


def alone(config: Experiment) -> bool:
    """Whether a run folder or experiment is of one model: made here, or of a dense one that nothing upcycles."""
    dense = (config.model.config or {}).get("model_type") in DENSE and config.model.upcycle is None
    return dense or (config.folder / "initial").exists()


def stages(config: Experiment) -> list[Stage]:
    """The stages in order."""
    run_folder, source = config.folder, _source(config)
    model = dump(config.model) | (
        {} if source is None else {"content": artifacts.fingerprint(_hashes(config, source))}
    )
    return [
        Stage(
            "prepare",
            (),
            {"corpus": dump(config.corpus), "model": model, "files": source_files(config)},
            lambda out: prepare(config, out, model_folder=source),
        ),
        Stage("initial", ("prepare",), {"model": model}, lambda out: _initial(config, source, out)),
        Stage(
            "train",
            ("prepare", "initial"),
            {"train": training(config, config.train)},
            lambda out: run_training(
                config,
                out,
                phase="train",
                section=config.train,
                model=run_folder / "initial",
                rows=mixed_rows(config, _corpus(config), config.train, config.train.tokens, salt=1),
                validation=curve_rows(config, _corpus(config)),
            ),
            trains=True,
        ),
        Stage(
            "evaluate", ("prepare", "initial", "train"), dump(config.evaluate), lambda out: _evaluate(config, out)
        ),
    ]


def check(config: Experiment) -> None:
    """Raise ConfigError for what cannot work. Reads no corpus and loads no weights."""
    source = _source(config)
    model_type = load_config(source).model_type if source is not None else config.model.config.get("model_type")
    if model_type not in DENSE | FAMILIES:
        raise ConfigError(
            f"model_type is '{model_type}': bcd train knows the dense families {', '.join(sorted(DENSE))} and the "
            f"mixtures of experts {', '.join(sorted(FAMILIES))}; any other model trains by blocks in a loop of "
            "your own, with bcd.initialize"
        )
    found = (
        load_config(source)
        if source is not None
        else _model_config({"vocab_size": config.corpus.tokenizer.vocab_size} | config.model.config)
    )
    try:
        layers(found, config.corpus.sequence_length)
        price_of(config, config.hardware.train)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    limit = getattr(found, "max_position_embeddings", None)
    if limit and config.corpus.sequence_length > limit:
        raise ConfigError(
            f"corpus.sequence_length is {config.corpus.sequence_length} but the model's "
            f"max_position_embeddings is {limit}"
        )
    check_sources(config.corpus)
    check_tokenizer(config)
    check_optimizer("train", config.train)
    if config.train.optimizer != "bcd":
        return
    if config.train.tokens is None:
        blocks_of(config.bcd, config.train, found)
    else:
        made = updates(budget(config.train.tokens, 0, config.train, config.corpus.sequence_length), config.train)
        with_stay(config.bcd, config.train, found, made, place="train")


def _source(config: Experiment) -> Path | None:
    return None if config.model.source is None else locate(config.model.source, config.model.revision)


def _hashes(config: Experiment, folder: Path) -> list[str]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return artifacts.file_hashes(files, config.folder / "hashes.json")


def _model_config(raw: dict, tokenizer=None):
    return model_config(raw, tokenizer, dense=raw.get("model_type") in DENSE)


def _corpus(config: Experiment) -> Corpus:
    return Corpus.open(config.folder / "prepare")


def _initial(config: Experiment, source: Path | None, out: Path) -> None:
    """The model before training: drawn by seed, or the source's, in `model.dtype`, with the corpus's tokenizer."""
    tokenizer = _corpus(config).tokenizer()
    if source is not None:
        model = load_model(source, config.model.dtype, config.model.experts)
    else:
        found = _model_config(config.model.config, tokenizer)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = AutoModelForCausalLM.from_config(found, dtype=torch.float32)
        model = model.to(getattr(torch, config.model.dtype))
        GenerationConfig.from_model_config(found).save_pretrained(out)
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"the model's vocab_size is {model.config.vocab_size} but the tokenizer has {len(tokenizer)} tokens: "
            "set model.config.vocab_size to at least that, or corpus.tokenizer.kind=model"
        )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _evaluate(config: Experiment, out: Path) -> None:
    """Held-out cross-entropy before and after, overall and by source."""
    split = _corpus(config).split("validation")
    rows = pack(split, np.arange(len(split)), config.corpus.sequence_length, config.corpus.packing, config.seed)
    rows = rows.take(np.arange(min(len(rows), config.evaluate.max_rows or len(rows))))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, dict] = {}
    for name, stage in (("before", "initial"), ("after", "train")):
        model = load_model(config.folder / stage, config.model.dtype, config.model.experts).to(device)
        sums_D, labels_D = evaluate.losses(model, rows, config.evaluate.batch_size, len(split))
        results[name] = evaluate.loss_of(sums_D, labels_D)
        results[name]["by_source"] = evaluate.by_group(sums_D, labels_D, split.source, split.sources)
        del model
    artifacts.write_json(out / evaluate.RESULTS, {"models": results})
