"""Our merge against mergekit-moe, on the same Mixtral-shaped experts: seconds, peak memory, cross-entropy.

    python -m venv /some/env && /some/env/bin/pip install mergekit
    python benchmarks/merge_rivals.py --mergekit /some/env/bin/mergekit-moe --folder /some/disk

Small experts are trained first: the corpus of configs/quickstart.yaml, a Mistral upcycled to 4 experts, a seed
phase, then each expert alone on its cluster beside the frozen shared part. mergekit-moe takes dense models, so each
submodel is written as the Mistral that it is, and 32 documents of each cluster are its prompts; ours reads rows of
the clusters. The result is measured on held-out documents of the corpus. Then large random experts (bf16) are
merged with random routers, for time and memory. Every merge is a process of its own, start and imports included.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import yaml
from measured import measured
from merge import random_model  # which takes this folder, where bcd.py lies, off the path

MODEL = {
    "model_type": "mistral",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}
EXPERTS, PROMPTS = 4, 32
OURS = ("probe", "centroid", "hidden", "cheap_embed", "random")
THEIRS = ("hidden", "cheap_embed", "random")
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def experiment(root: Path):
    """The quickstart experiment on a Mistral upcycled to EXPERTS."""
    from disco.config import Experiment

    model = {"config": MODEL, "upcycle": {"experts": EXPERTS, "top_k": 2}}
    overrides = [f"model={json.dumps(model)}", f"runs={root}", "name=small", "train.mode=expert", "baselines=[]"]
    overrides += ["seed_phase.tokens=60000", "train.tokens=60000", "launch.threads=1"]
    return Experiment.load(Path(__file__).parents[1] / "configs" / "quickstart.yaml", overrides)


def as_mistral(single: Path, out: Path) -> Path:
    """A Mixtral of one expert as the dense model that it is."""
    from transformers import MistralConfig

    from disco.checkpoint import Checkpoint, copy_side_files, write_model
    from disco.tensor_files import Output

    source = Checkpoint.open(single)
    kept = {key: value for key, value in source.config.to_dict().items() if key in MistralConfig().to_dict()}
    config = MistralConfig(**(kept | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    outputs = []
    for key, stored in source.tensors.items():
        role = source.family.role(key)
        if role.kind == "expert":
            head, _, name = key.partition(".block_sparse_moe.experts.0.")
            key = f"{head}.mlp.{PARTS[name.split('.')[0]]}.weight"
        if role.kind != "router":
            outputs.append(Output.copy(key, stored))
    out.mkdir(parents=True)
    write_model(out, config, outputs, "a dense model")
    copy_side_files(single, out)
    return out


def large(root: Path, width: int, layers: int) -> None:
    """Random Mixtrals of one expert that share all but the expert."""
    from transformers import MixtralConfig

    from disco.checkpoint import Checkpoint, identity, write_model
    from disco.split import write_submodel_note
    from disco.tensor_files import Output

    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        num_local_experts=1,
        num_experts_per_tok=1,
        sliding_window=None,
        dtype="bfloat16",
        architectures=["MixtralForCausalLM"],
    )
    random_model(root / "start", config, 0)
    base = Checkpoint.open(root / "start")
    for e in range(EXPERTS):
        random_model(root / "drawn", config, e + 1)
        drawn = Checkpoint.open(root / "drawn")
        outputs = [
            Output.copy(key, (drawn if base.family.role(key).kind == "expert" else base).tensors[key])
            for key in base.tensors
        ]
        (root / "train" / str(e)).mkdir(parents=True)
        write_model(root / "train" / str(e), config, outputs, "a submodel")
        note = dict(base=identity(root / "start"), expert=e, experts=EXPERTS, clustering="")
        write_submodel_note(root / "train" / str(e), **note)
        for file in (root / "drawn").iterdir():
            file.unlink()
        (root / "drawn").rmdir()


def ours(root: Path, router: str) -> None:
    """Merge in this process: as the pipeline's stage does it, or with random routers where there is no corpus."""
    from disco.checkpoint import load_config
    from disco.family import with_experts
    from disco.merge import merge
    from disco.stages import merge_submodels

    out = root / f"ours-{router}"
    if (root / "experiment.yaml").exists():
        config = experiment(root.parent)
        section = config.merge.model_copy(update={"router": router})
        merge_submodels(config.model_copy(update={"merge": section}), "", out)
    else:
        full = with_experts(load_config(root / "start"), EXPERTS, 2)
        merge(root / "start", [root / "train" / str(e) for e in range(EXPERTS)], out, full_config=full)


def prompts(config) -> list[list[str]]:
    """Texts of some documents of each cluster, as long as a row."""
    from disco.cluster import assignments
    from disco.corpus import Corpus

    corpus = Corpus.open(config.folder / "prepare")
    tokenizer, split = corpus.tokenizer(), corpus.split("train")
    labels = assignments(config.folder / "cluster", "train")
    found = []
    for e in range(EXPERTS):
        chosen = [index for index, label in enumerate(labels) if label == e][:PROMPTS]
        ids = tokenizer(list(split.texts(chosen)))["input_ids"]
        found.append([tokenizer.decode(one[: config.corpus.sequence_length - 1]) for one in ids])
    return found


def theirs(root: Path, dense: list[Path], mode: str, texts: list[list[str]], program: Path) -> list[str]:
    """The command that merges with mergekit-moe."""
    base, *experts = dense
    section = {"base_model": str(base), "gate_mode": mode, "experts_per_token": 2, "experts": []}
    for folder, positive in zip(experts, texts, strict=True):
        section["experts"].append({"source_model": str(folder), "positive_prompts": positive})
    (root / f"{mode}.yaml").write_text(yaml.safe_dump(section))
    return [str(program), str(root / f"{mode}.yaml"), str(root / f"mergekit-{mode}"), "--device", "cpu", "--quiet"]


def cost_of(command: list[str], folder: Path) -> dict:
    """Run a merge into `folder`; what it took."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return measured(command, quiet=True, environment=environment)._asdict() | {"folder": str(folder)}


def cross_entropy(folder: Path, config) -> float:
    from disco.corpus import Corpus
    from disco.engine import load_model
    from disco.evaluate import losses
    from disco.train import rows_of

    split = Corpus.open(config.folder / "prepare").split("validation")
    sums, labels = losses(load_model(folder, "float32", "eager"), rows_of(config, split), 16, len(split))
    return float(sums.sum() / labels.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, required=True, help="the program mergekit-moe")
    parser.add_argument("--folder", type=Path, help="where there is room; the system's temporary folder if absent")
    parser.add_argument("--width", type=int, default=1024, help="of the large experts, a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ours", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        root = Path(options.ours[0])
        (root / f"ours-{options.ours[1]}").mkdir()
        return ours(root, options.ours[1])
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="rivals.") as folder:
        from disco import pipeline

        config = experiment(Path(folder))
        pipeline.run(config, until="train", say=lambda line: None)
        for name, root, routers in (("small", config.folder, OURS), ("large", Path(folder) / "large", ("random",))):
            if name == "large":
                root.mkdir()
                large(root, options.width, options.layers)
            singles = [root / "start", *(root / "train" / str(e) for e in range(EXPERTS))]
            dense = [as_mistral(single, root / f"dense-{n}") for n, single in enumerate(singles)]
            if name == "large":
                for one in dense:  # mergekit opens a tokenizer even where it has no prompts
                    for file in (config.folder / "prepare" / "tokenizer").iterdir():
                        (one / file.name).write_bytes(file.read_bytes())
            texts = prompts(config)
            for router in routers:
                command = [sys.executable, __file__, "--mergekit", "-", "--ours", str(root), router]
                found[f"{name}, ours, {router}"] = cost_of(command, root / f"ours-{router}")
            for mode in THEIRS if name == "small" else ("random",):
                command = theirs(root, dense, mode, texts, options.mergekit)
                found[f"{name}, mergekit-moe, {mode}"] = cost_of(command, root / f"mergekit-{mode}")
        for name, row in found.items():
            row["cross_entropy"] = cross_entropy(Path(row["folder"]), config) if "small" in name else None
            row.pop("folder")
        for e in range(EXPERTS):
            loss = cross_entropy(config.folder / "train" / str(e), config)
            found[f"small, submodel {e} alone"] = {"cross_entropy": loss}
    print("| experts, merge, router | seconds | processor seconds | peak memory GB | cross-entropy |")
    print("|---|---|---|---|---|")
    for name, row in found.items():
        loss = "" if row["cross_entropy"] is None else f"{row['cross_entropy']:.3f}"
        cost = f"{row['seconds']:.1f} | {row['cpu']:.1f} | {row['peak'] / 1e9:.2f}" if "seconds" in row else " | | "
        print(f"| {name} | {cost} | {loss} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
