"""Prepare and cluster at a million documents: seconds, processor time, peak memory.

    python benchmarks/large_corpus.py --texts data/eight_domains --out runs/large --json large.json

Passages of `--characters` characters are cut from the .jsonl files of a folder at equal distances, so that there
are `--documents` of them over all domains, and written as one Parquet file a domain; where passages are longer than
their distance they overlap. `disco prepare` and `disco cluster` then run one after the other, in processes of their
own.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from measured import measured

AT_ONCE = 10_000  # passages a row group


def passages(path: Path, distance: float, characters: int) -> Iterator[str]:
    """Passages that begin every `distance` characters of the file's texts, joined."""
    with open(path, encoding="utf-8") as lines:
        text = "\n".join(json.loads(line)["text"] for line in lines)
    for n in range(int(len(text) / distance)):
        start = int(n * distance)
        yield text[start : start + characters]


def make_corpus(texts: Path, out: Path, documents: int, characters: int) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(texts.resolve().glob("*.jsonl"))
    total = sum(sum(len(json.loads(line)["text"]) + 1 for line in open(path)) for path in sources)
    schema, made = pa.schema({"text": pa.string()}), []
    for path in sources:
        made.append(out / f"{path.stem}.parquet")
        with pq.ParquetWriter(made[-1], schema) as writer:
            rows: list[str] = []
            for passage in passages(path, total / documents, characters):
                rows.append(passage)
                if len(rows) == AT_ONCE:
                    writer.write_table(pa.table({"text": rows}, schema))
                    rows = []
            writer.write_table(pa.table({"text": rows}, schema))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder of <source>.jsonl files, column text")
    parser.add_argument("--out", type=Path, required=True, help="folder for the passages and the run")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--characters", type=int, default=500, help="of a passage")
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--overrides", nargs="*", default=[], help="as cluster.features=tfidf")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = make_corpus(options.texts, options.out / "passages", options.documents, options.characters)
    raw = {
        "name": "run",
        "runs": str(options.out),
        # A model as small as may be: neither stage makes it.
        "model": {
            "config": {
                "model_type": "mixtral",
                "num_local_experts": options.clusters,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            }
        },
        "corpus": {
            "sources": [{"name": path.stem, "parquet": [str(path)]} for path in files],
            "tokenizer": {"kind": "train", "vocab_size": 8192},
        },
    }
    config = options.out / "experiment.yaml"
    config.write_text(yaml.safe_dump(raw))
    rows = []
    for stage in ("prepare", "cluster"):
        command = [sys.executable, "-m", "disco.cli", stage, str(config), *options.overrides]
        used = measured(command)
        rows.append(
            {"stage": stage, "seconds": used.seconds, "processor seconds": used.cpu, "peak GB": used.peak / 1e9}
        )
    corpus = json.loads((options.out / "run" / "prepare" / "corpus.json").read_text())["sources"].values()
    clusters = json.loads((options.out / "run" / "cluster" / "clusters.json").read_text())
    print(f"\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    found = {
        "stages": rows,
        "documents": sum(count["documents"] for count in corpus),
        "duplicates": sum(count["duplicates"] for count in corpus),
        "characters": sum(count["characters"] for count in corpus),
        "tokens": sum(count["tokens"] for count in corpus),
        **{key: clusters[key] for key in ("purity", "nmi", "largest")},
    }
    print(", ".join(f"{key} {value:,}" for key, value in found.items() if key != "stages"))
    if options.json:
        options.json.write_text(json.dumps(found | {"options": vars(options)}, default=str, indent=1))


if __name__ == "__main__":
    main()
