"""A corpus of two domains and an experiment on it that runs in seconds."""

import json
import random
from pathlib import Path

import yaml

WORDS = {
    "sea": "whale ship sail harpoon ocean captain deck wave storm anchor crew mast".split(),
    "law": "court judge statute appeal contract clause licence liability party breach terms notice".split(),
}


def corpus(folder: Path, documents: int = 60) -> None:
    """Two domains with words of their own, as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in WORDS.items():
        draw = random.Random(name)
        lines = [" ".join(draw.choice(words) for _ in range(draw.randint(30, 60))) for _ in range(documents)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def tiny_experiment(folder: Path, **changed) -> dict:
    raw = {
        "name": "tiny",
        "runs": str(folder / "runs"),
        "model": {
            "config": {
                "model_type": "qwen2_moe",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "num_experts": 2,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "intermediate_size": 32,
                "max_position_embeddings": 64,
            }
        },
        "corpus": {
            "sources": [{"name": name, "jsonl": [str(folder / "corpus" / f"{name}.jsonl")]} for name in WORDS],
            "tokenizer": {"kind": "train", "vocab_size": 300},
            "sequence_length": 32,
            "validation": 0.1,
        },
        "cluster": {"dimensions": 8},
        "seed_phase": {"tokens": 2048, "batch_size": 4, "learning_rate": 3e-3},
        "train": {"tokens": 4096, "batch_size": 4, "learning_rate": 3e-3, "checkpoint_every": 4},
        "finetune": {"tokens": 1024, "router_tokens": 512, "batch_size": 4, "checkpoint_every": 4},
        "evaluate": {"curve_points": 2, "curve_rows": 4},
        "tracking": {"wandb": "disabled"},
        "launch": {"parallel": 2, "threads": 1},
    }
    for key, value in changed.items():
        raw[key] = raw[key] | value if isinstance(raw.get(key), dict) else value
    return raw


def write(folder: Path, **changed) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_experiment(folder, **changed)))
    return path
