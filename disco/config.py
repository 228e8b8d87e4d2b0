"""The experiment file: one YAML, unknown keys refused, every section frozen.

Sections follow the data: model, corpus, cluster, seed_phase, train, merge, finetune, evaluate, baselines; bcd and
fsep for the stages that use them; and tracking, hardware, launch, which change nothing in the weights. Defaults
are the recommended values.
"""

import difflib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from disco.block_descent import BlockDescent
from disco.expert_sharding import ExpertSharding
from disco.launching import Launch
from disco.model_section import Model
from disco.overrides import apply
from disco.schema import BelowOne, ConfigError, Positive, Section, Share, Tokens


class Source(Section):
    """One named part of the corpus; exactly one of `files`, `text`, `jsonl`, `parquet`, `csv`, `hub`."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    files: list[str] | None = Field(None, description="globs; each file is a document")
    text: list[str] | None = Field(None, description="text files, one document a line")
    jsonl: list[str] | None = None
    parquet: list[str] | None = None
    csv: list[str] | None = None
    hub: str | None = Field(None, description="a Hugging Face hub data set")
    package: str | None = Field(None, description="installed Python package under which `files` globs look")
    root: str = Field(".", description="folder that relative globs start from")
    subset: str | None = Field(None, description="hub only: configuration name")
    split: str = Field("train", description="hub only")
    column: str = Field("text", description="column that holds the text")
    max_bytes: Positive | None = Field(None, description="stop after this many bytes of UTF-8 text")
    max_documents: Positive | None = None
    passage_chars: Positive | None = Field(
        None, description="cut documents into passages of about this many characters at paragraph ends"
    )

    @model_validator(mode="after")
    def _one_kind(self):
        given = [kind for kind in SOURCE_KINDS if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError(
                f"source '{self.name}' names {' and '.join(given) or 'nothing to read'}: "
                f"give exactly one of {', '.join(SOURCE_KINDS)}"
            )
        if self.package and not self.files:
            raise ValueError(f"source '{self.name}': package goes with files")
        return self


SOURCE_KINDS = ("files", "text", "jsonl", "parquet", "csv", "hub")


class Tokenizer(Section):
    kind: Literal["model", "train"] = Field(
        "model", description="the model's own, or a byte-level BPE trained on the corpus"
    )
    vocab_size: Positive = Field(8192, description="train only")


class Corpus(Section):
    sources: list[Source] = Field(min_length=1)
    tokenizer: Tokenizer = Tokenizer()
    sequence_length: Annotated[int, Field(ge=8)] = 1024
    packing: Literal["pack", "document"] = Field(
        "pack", description="several documents a row, kept apart in attention, or one document a row"
    )
    validation: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.05, description="share of each source's documents held out"
    )
    min_chars: Tokens = Field(20, description="shorter documents are dropped, and counted")

    @field_validator("sources")
    @classmethod
    def _names(cls, sources):
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are named '{twice[0]}': give each its own name")
        return sources


class Cluster(Section):
    k: Positive | None = Field(
        None,
        description="clusters, and submodels; the model's experts if absent. With fewer, each submodel has a group "
        "of experts, or one that is cloned into its group where all start from one",
    )
    method: Literal["kmeans", "random"] = "kmeans"
    features: Literal["tfidf", "embedding", "hidden"] = "tfidf"
    dimensions: Positive | None = Field(
        None, description="SVD dimensions of the tf-idf features; max(32, 2 k) if absent"
    )
    max_terms: Positive = Field(50_000, description="tf-idf vocabulary")
    balance: Literal["none", "tokens"] = "tokens"
    n_init: Positive = 10
    minibatch_above: Positive = Field(1_000_000, description="documents beyond which k-means streams")


class Optimizer(Section):
    """What every training stage has; AdamW with decoupled weight decay, on all parameters or a block at a time."""

    optimizer: Literal["adamw", "bcd"] = Field(
        "adamw", description="bcd: block coordinate descent, see section bcd; all parameters, memory of a part"
    )
    batch_size: Positive = Field(16, description="sequences in a global batch")
    micro_batch_size: Positive | None = Field(None, description="sequences a device at once; all if absent")
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    warmup: Share = Field(0.03, description="share of the steps")
    min_learning_rate: Share = Field(0.1, description="share of learning_rate at the end of the schedule")
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    clip: Annotated[float, Field(ge=0)] = Field(1.0, description="global gradient norm; 0 = off")
    zero_stage: Literal[0, 1, 2, 3] = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: bool = False
    loss_chunk: Positive = Field(1024, description="rows of logits that exist at once")
    processes: Positive = Field(1, description="data-parallel processes (devices)")
    checkpoint_every: Tokens = Field(200, description="optimizer steps; 0 = only at the end")
    log_every: Positive = 10

    @model_validator(mode="after")
    def _whole_batches(self):
        micro = self.micro_batch_size or -(-self.batch_size // self.processes)
        together = micro * self.processes
        if self.batch_size % together:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size x processes "
                f"({micro} x {self.processes}): set it to {max(1, self.batch_size // together) * together}"
            )
        return self

    @property
    def micro_batch(self) -> int:
        return self.micro_batch_size or self.batch_size // self.processes

    @property
    def accumulation(self) -> int:
        return self.batch_size // (self.micro_batch * self.processes)


class SeedPhase(Optimizer):
    """The shared start of all submodels, trained once on an unclustered mix."""

    tokens: Tokens = Field(
        0, description="positions to train on; 0 = off; absent = as train.tokens from scratch, 0 from a checkpoint"
    )
    model: Literal["submodel", "full"] | None = Field(
        None,
        description="train one expert beside the shared part, from which all experts start, or the full MoE; "
        "absent = submodel from scratch, full from a checkpoint",
    )


class Train(Optimizer):
    tokens: Tokens | None = Field(
        1_000_000,
        description="positions over all submodels, shared by cluster size; null = one pass. The one dial: seed "
        "phase and fine-tuning follow it unless they are set",
    )
    mode: Literal["full", "expert", "bcd"] = Field(
        "full",
        description="expert: the shared part is frozen; bcd: full, with optimizer: bcd; absent = expert where a "
        "checkpoint is continued",
    )

    @model_validator(mode="before")
    @classmethod
    def _mode_and_optimizer(cls, raw: Any) -> Any:
        """mode: bcd and optimizer: bcd say the same unless the mode is expert; both are set."""
        if not isinstance(raw, dict):
            return raw
        mode, optimizer = raw.get("mode"), raw.get("optimizer")
        if mode == "bcd" and optimizer not in (None, "bcd"):
            raise ValueError(f"mode is 'bcd' but optimizer is {optimizer!r}: set mode=full, or leave optimizer out")
        if mode == "bcd":
            return raw | {"optimizer": "bcd"}
        return raw | {"mode": "bcd"} if optimizer == "bcd" and mode in (None, "full") else raw


class Merge(Section):
    backbone: Literal["tokens", "uniform"] | list[Annotated[float, Field(ge=0)]] = "tokens"
    router: Literal["original", "random", "centroid", "probe", "hidden", "cheap_embed"] = Field(
        "probe", description="hidden and cheap_embed: rows from prompts, as mergekit-moe makes them"
    )
    renormalize: bool | None = Field(
        None,
        description="norm_topk_prob of the merged model: experts trained at weight 1 need it; absent = true, "
        "but with router: original the source's own setting",
    )
    shared: Literal["average", "task_arithmetic", "ties", "keep"] = Field(
        "average",
        description="how the shared part is made of the submodels'; ties and task_arithmetic of what "
        "training changed, keep from one of them",
    )
    scale: Annotated[float, Field(gt=0)] | None = Field(
        None, description="of the summed changes; absent = 0.4 for task_arithmetic, 1 for ties"
    )
    density: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="share of each change that ties keeps")
    keep: Tokens | None = Field(None, description="submodel whose shared part is kept, for shared: keep")
    layer_weights: dict[str, list[Annotated[float, Field(ge=0)]]] = Field(
        {}, description="weights instead of backbone's for tensors whose names begin so: {model.layers.0: [1, 2]}"
    )
    clone_noise: Annotated[float, Field(ge=0)] = Field(
        0.05, description="noise on clones where cluster.k < experts, as a share of each tensor's spread"
    )
    probe_tokens: Positive = Field(20_000, description="router inputs captured a layer")
    probe_l2: Annotated[float, Field(gt=0)] = Field(1.0, description="scikit-learn's C of the probe")


class Finetune(Optimizer):
    tokens: Tokens = Field(
        0, description="positions; 0 = off; absent = half of train.tokens from scratch, a quarter from a checkpoint"
    )
    router_tokens: Tokens = Field(0, description="positions of router-only training first")
    experts: Literal["replicated", "autoep", "fsep"] = Field(
        "replicated",
        description="every process has all experts; autoep: an equal share of them, by DeepSpeed; fsep: a slice of "
        "each, see section fsep",
    )
    record_loads: bool = Field(
        False, description="write the tokens that each process sends to each expert to loads.npz, for fsep simulate"
    )
    aux_loss: Annotated[float, Field(ge=0)] = Field(0.01, description="coefficient of the balancing loss")
    z_loss: Annotated[float, Field(ge=0)] = Field(0.0, description="coefficient of the router z-loss")
    collapse_share: Share = Field(
        0.95, description="one expert's share of a layer's tokens that counts as collapsed"
    )
    collapse_logs: Positive = Field(10, description="stop after so many such logs in a row")


class Joint(Section):
    """What the joint baseline does differently from `finetune`, whose settings it takes otherwise."""

    optimizer: Literal["adamw", "bcd"] | None = None
    learning_rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="absent = the highest of the stages' from scratch, finetune's from a checkpoint"
    )
    batch_size: Positive | None = None
    warmup: Share | None = None


class Task(Section):
    name: str
    include_path: str | None = None
    num_fewshot: Tokens | None = None
    limit: Positive | None = None


class Evaluate(Section):
    batch_size: Positive = 16
    max_rows: Positive | None = Field(None, description="validation rows a model; all if absent")
    curve_points: Tokens = Field(10, description="validation losses along finetune and joint; 0 = none")
    curve_rows: Positive = Field(64, description="validation rows of such a point")
    tasks: list[Task] = []


class Tracking(Section):
    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "moe-disco"
    tensorboard: bool = Field(False, description="event files in the run folder too")


class Hardware(Section):
    """What each stage is priced as; on a CPU the price is simulated, and says so."""

    train: str = "rtx4090"
    finetune: str = "a100"
    other: str = Field("cpu", description="stages that train nothing: prepare, cluster, merge, evaluate, report")
    table: str | None = Field(None, description="a YAML file whose entries override the built-in table")


class Experiment(Section):
    """A whole experiment. `Experiment.load(path, overrides)` is how one is made."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    runs: str = Field("runs", description="folder that holds the run folders")
    model: Model
    corpus: Corpus
    cluster: Cluster = Cluster()
    seed_phase: SeedPhase = SeedPhase()
    train: Train = Train()
    bcd: BlockDescent = BlockDescent()
    fsep: ExpertSharding = ExpertSharding()
    merge: Merge = Merge()
    finetune: Finetune = Finetune()
    evaluate: Evaluate = Evaluate()
    baselines: list[Literal["joint", "random_split"]] = []
    joint: Joint = Joint()
    tracking: Tracking = Tracking()
    hardware: Hardware = Hardware()
    launch: Launch = Launch()

    @model_validator(mode="before")
    @classmethod
    def _follow_the_dial(cls, raw: Any) -> Any:
        """Fill in the budgets that follow train.tokens, and the mode (benchmarks/disco.py says what it brings)."""
        if not isinstance(raw, dict):
            return raw
        sections = {name: raw.get(name) or {} for name in ("model", "seed_phase", "train", "finetune")}
        dial = sections["train"].get("tokens", Train.model_fields["tokens"].default)
        if not isinstance(dial, int) or not all(isinstance(section, dict) for section in sections.values()):
            return raw
        scratch = sections["model"].get("source") is None
        extends = sections["model"].get("extend") is not None
        if extends or not scratch and sections["train"].get("optimizer") != "bcd":
            raw = raw | {"train": {"mode": "expert"} | sections["train"]}
        tune = 0 if extends else dial // (2 if scratch else 4)
        for name, tokens in (("seed_phase", dial if scratch else 0), ("finetune", tune)):
            raw = raw | {name: {"tokens": tokens} | sections[name]}
        return raw

    @model_validator(mode="after")
    def _extension(self):
        """Settings that would change what `model.extend` keeps, or that it has no use for."""
        if self.model.extend is None:
            return self
        wanted = {
            "seed_phase.tokens": (self.seed_phase.tokens, 0),
            "train.mode": (self.train.mode, "expert"),
            "cluster.k": (self.cluster.k or self.model.extend.experts, self.model.extend.experts),
            "baselines": (self.baselines, []),
        }
        used = {"router", "probe_tokens", "probe_l2"}
        for key, field in Merge.model_fields.items():
            if key not in used:
                wanted[f"merge.{key}"] = (getattr(self.merge, key), field.default)
        for key, (found, value) in wanted.items():
            if found != value:
                raise ValueError(f"{key} is {found!r}, with model.extend it has to be {value!r}: leave it out")
        if self.merge.router not in (fits := ("probe", "centroid", "random")):
            raise ValueError(f"merge.router is '{self.merge.router}': rows of new experts are {', '.join(fits)}")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] = ()) -> "Experiment":
        """Read a YAML experiment and apply `section.key=value` overrides (values are YAML); `--section.key=value`
        and the two words `--section.key value` say the same.

        Raises ConfigError, naming the value, its place and the remedy.
        """
        path = Path(path)
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such experiment file") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: holds no mapping of sections (name, model, corpus, ...)")
        apply(raw, overrides)
        return cls.parse(raw, where=str(path))

    @classmethod
    def parse(cls, raw: dict, where: str = "experiment") -> "Experiment":
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(problem, where) for problem in error.errors())) from None

    def dump(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    @property
    def folder(self) -> Path:
        return Path(self.runs) / self.name


def closest(name: str, known: Iterable[str]) -> str:
    """A remedy for a mistyped name."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


def _explain(problem: dict, where: str) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {place}: {closest(str(problem['loc'][-1]), _keys(problem['loc'][:-1]))}"
    if problem["type"] == "missing":
        return f"{where}: {place} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    shown = "" if isinstance(value, (dict, BaseModel)) else f" is {value!r}"
    return f"{where}: {place}{shown}: {message}"


def _keys(loc: tuple) -> list[str]:
    """Field names of the section that `loc` leads to."""
    model: Any = Experiment
    for part in loc:
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            continue
        field = model.model_fields.get(part)
        model = _section_of(field.annotation) if field else model
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _section_of(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (list, typing.Union, types.UnionType, Annotated):
        for inner in typing.get_args(annotation):
            found = _section_of(inner)
            if isinstance(found, type) and issubclass(found, BaseModel):
                return found
    return annotation
