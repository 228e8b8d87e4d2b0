"""What can be refused before any work starts, with value, place and remedy."""

import importlib.util
import math
import os
from collections.abc import Collection

import torch
from transformers import PretrainedConfig

from disco import artifacts
from disco.checkpoint import expected
from disco.config import ConfigError, Experiment, Optimizer
from disco.descent import blocks_of, with_stay
from disco.experts import check_experts
from disco.family import as_submodel, num_experts, top_k, with_experts
from disco.sources import check_sources
from disco.stages import clusters, groups, joint_section, old_text, starts_single, submodel_renormalize
from disco.start import described_model
from disco.tokenizer import check_tokenizer
from disco.train import budget, price_of, updates
from launch.tracking import need


def check(config: Experiment, trained_here: Collection[str] = ("seed_phase", "train", "finetune")) -> None:
    """Raise ConfigError for an experiment that cannot work. Reads no corpus and loads no weights.

    `trained_here` names the sections whose training this machine has the devices for.
    """
    full = described_model(config)
    experts = num_experts(full)
    _check_model(config, full, experts)
    try:
        need(config.tracking)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_sources(config.corpus)
    check_tokenizer(config)
    _check_nodes(config)
    for name in ("seed_phase", "train", "finetune"):
        check_optimizer(name, getattr(config, name))
        if name in trained_here:
            nodes = config.launch.nodes if name == "finetune" else 1
            _check_devices(name, getattr(config, name), nodes)
            if nodes > 1 and not config.launch.node_command:
                raise ConfigError(
                    f"launch.nodes is {nodes} but nothing starts processes on them: disco launch --on slurm does, "
                    "or set launch.node_command to what runs a command on each"
                )
    _check_blocks(config, full)
    joint = {"joint": joint_section(config)} if "joint" in config.baselines else {}
    check_experts(config, full, {"finetune": config.finetune} | joint)
    for stage in ("train", "finetune", "other"):
        try:
            price_of(config, getattr(config.hardware, stage))
        except ValueError as error:
            raise ConfigError(f"hardware.{stage}: {error}") from None
    if config.evaluate.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("evaluate.tasks needs the package lm_eval: pip install 'moe-disco[eval]'")
    artifacts.need_disk(config.folder, _disk(config, full), "this experiment")


def _check_model(config: Experiment, full, experts: int) -> None:
    extension = config.model.extend
    largest = len(groups(config)[0])
    if not starts_single(config):
        as_submodel(full, largest, submodel_renormalize(config))
    if extension is not None:
        old = experts - extension.experts
        if extension.begin is not None and extension.begin >= old:
            raise ConfigError(f"model.extend.begin is {extension.begin}: {config.model.source} has {old} experts")
        old_text(config)
    elif clusters(config) < 2:
        raise ConfigError("cluster.k is 1: there is nothing to merge with fewer than 2 clusters")
    if experts < 2:
        raise ConfigError(f"the model has {experts} routed expert: there is nothing to merge with fewer than 2")
    if top_k(full) > experts:
        raise ConfigError(f"the model routes each token to {top_k(full)} experts but has {experts}")
    with_experts(full, experts, top_k(full), config.merge.renormalize)
    limit = getattr(full, "max_position_embeddings", None)
    if limit and config.corpus.sequence_length > limit:
        raise ConfigError(
            f"corpus.sequence_length is {config.corpus.sequence_length} but the model's "
            f"max_position_embeddings is {limit}"
        )
    if (
        config.model.source
        and config.seed_phase.tokens
        and config.seed_phase.model == "submodel"
        and (not starts_single(config))
    ):
        raise ConfigError(
            "seed_phase.model is 'submodel' but model.source has trained experts, which a single-expert seed "
            "would throw away: set seed_phase.model=full"
        )
    if starts_single(config) and config.merge.router == "original":
        raise ConfigError(
            "merge.router is 'original' but the submodels start from a single expert, which has no router: "
            "set merge.router=probe"
        )
    keeps = config.merge.keep is not None
    if keeps != (config.merge.shared == "keep") or (keeps and config.merge.keep >= clusters(config)):
        raise ConfigError(
            f"merge.keep is {config.merge.keep} and merge.shared {config.merge.shared}: keep names one of the "
            f"{clusters(config)} submodels, from 0, and goes with shared: keep"
        )
    if isinstance(config.merge.backbone, list):
        weights = config.merge.backbone
        if len(weights) != clusters(config) or sum(weights) <= 0:
            raise ConfigError(
                f"merge.backbone is {weights}: it needs {clusters(config)} weights, one a submodel, of positive sum"
            )
    if config.cluster.features != "tfidf" and not (config.model.source or config.seed_phase.tokens):
        raise ConfigError(
            f"cluster.features is '{config.cluster.features}' but the model is untrained: use tfidf, give "
            "model.source, or set seed_phase.tokens"
        )


def check_optimizer(name: str, section: Optimizer) -> None:
    """Raise ConfigError for settings of a training stage that exclude each other."""
    frozen = (getattr(section, "mode", "full") == "expert" and "train.mode expert") or (
        getattr(section, "router_tokens", 0) and "finetune.router_tokens"
    )
    if section.zero_stage == 3 and frozen:
        raise ConfigError(
            f"{name}.zero_stage is 3, which cannot train beside frozen parameters ({frozen}): "
            f"set {name}.zero_stage=2"
        )


def _check_nodes(config: Experiment) -> None:
    nodes, processes = config.launch.nodes, config.finetune.processes
    if processes % nodes:
        raise ConfigError(
            f"finetune.processes is {processes}, which launch.nodes={nodes} machines cannot share evenly: "
            f"set finetune.processes={max(1, processes // nodes) * nodes}"
        )


def _check_devices(name: str, section: Optimizer, nodes: int) -> None:
    gpus = torch.cuda.device_count()
    available = (gpus or os.cpu_count() or 1) * nodes
    if section.processes > available:
        place = "this machine has" if nodes == 1 else f"{nodes} machines like this one have"
        raise ConfigError(
            f"{name}.processes is {section.processes} but {place} "
            f"{available} {'GPUs' if gpus else 'CPU cores'}: set {name}.processes={available}"
        )
    if section.precision == "bf16" and gpus and not torch.cuda.is_bf16_supported():
        raise ConfigError(f"{name}.precision is bf16, which this GPU does not have: set {name}.precision=fp32")


def _check_blocks(config: Experiment, full: PretrainedConfig) -> None:
    """Of every stage that descends on blocks: that they suit its model, and that each gets its turn."""
    single, part = as_submodel(full, 1), groups(config)[0]
    submodel = as_submodel(full, len(part), submodel_renormalize(config))
    share = None if config.train.tokens is None else max(1, config.train.tokens // clusters(config))
    trainable = "experts" if config.train.mode == "expert" else "all"
    stages: list[tuple[str, Optimizer, PretrainedConfig, int | None, str]] = [
        (
            "seed_phase",
            config.seed_phase,
            single if starts_single(config) else full,
            config.seed_phase.tokens,
            "all",
        ),
        ("train (a submodel)", config.train, submodel, share, trainable),
        ("finetune", config.finetune, full, config.finetune.tokens, "all"),
    ]
    if "joint" in config.baselines:
        stages.append(("joint", joint_section(config), full, None, "all"))
    for name, section, model, tokens, what in stages:
        if section.optimizer != "bcd" or tokens == 0:
            continue
        if tokens is None:
            blocks_of(config.bcd, section, model, what)
        else:
            made = updates(budget(tokens, 0, section, config.corpus.sequence_length), section)
            with_stay(config.bcd, section, model, made, place=name, trainable=what)


def _disk(config: Experiment, full) -> int:
    """Bytes that the model folders will take: each stage keeps one, and each training a checkpoint beside it."""
    parameters, single = _parameters(full), _parameters(with_experts(full, 1, 1))
    stages = 3 + 3 * len(config.baselines)
    weights = 4 * (stages * parameters + (1 + len(config.baselines)) * clusters(config) * single)
    optimizer_state = 12 * parameters
    return weights + optimizer_state


def _parameters(full: PretrainedConfig) -> int:
    return sum(math.prod(shape) for shape in expected(full).shapes.values())
