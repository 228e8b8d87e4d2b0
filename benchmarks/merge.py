"""Split, merge and upcycle at the size of Qwen1.5-MoE, streamed: peak memory, and time against a plain copy.

    python benchmarks/merge.py --experts 4 --folder /some/disk

Weights are random bf16, every submodel's shared part differs. Each step runs in a process of its own; its time is
set against that of reading and writing as many bytes in the same process, right before it, in megabyte pieces.
Needs about 27 GB of disk at --experts 4. Then the configuration with all 60 experts is split on the meta device
and every submodel's and the merged model's keys and shapes are compared with Hugging Face's.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# bcd.py lies beside this file: keep it from hiding the package.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent] + ["."]

QWEN = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
}
MOE = QWEN | {
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "rope_theta": 1e6,
}
STEPS = ("make", "split", "merge", "upcycle")


def config_of(experts: int, layers: int):
    from transformers import Qwen2MoeConfig

    size = {"num_experts": experts, "num_hidden_layers": layers, "num_experts_per_tok": min(4, experts)}
    return Qwen2MoeConfig(**(MOE | size), dtype="bfloat16", architectures=["Qwen2MoeForCausalLM"])


def random_model(folder: Path, config, seed: int) -> None:
    """A checkpoint of random bf16 weights: one drawn block, read from another place for every tensor."""
    import torch

    from disco.checkpoint import expected, write_model
    from disco.tensor_files import Output, as_bytes

    block = torch.randn(1 << 23, generator=torch.Generator().manual_seed(seed)) * 0.02
    data = bytes(as_bytes(block.bfloat16()))
    outputs = []
    for index, (key, shape) in enumerate(expected(config).shapes.items()):
        outputs.append(Output(key, "BF16", shape, lambda n=2 * _count(shape), i=index: _cut(data, n, i)))
    folder.mkdir(parents=True)
    write_model(folder, config, outputs, "a random model")


def _count(shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _cut(data: bytes, size: int, index: int):
    place = (index * 4099 * 2) % len(data)
    while size:
        piece = data[place : place + min(size, len(data) - place, 1 << 20)]
        size -= len(piece)
        place = (place + len(piece)) % len(data)
        yield piece


def step(name: str, root: Path, experts: int, layers: int) -> dict:
    """Run one step; returns bytes moved, seconds of it and of a copy of as many bytes, and peak memory."""
    import torch

    from disco.checkpoint import identity
    from disco.family import with_experts
    from disco.merge import merge
    from disco.model_section import Upcycle
    from disco.split import split, write_submodel_note
    from disco.tensor_files import weight_files
    from disco.upcycle import upcycle

    full, subs, out = root / "full", [root / f"sub{e}" for e in range(experts)], root / name
    config = config_of(experts, layers)
    if name == "make":
        random_model(full, config, 0)
        base = identity(full)
        for e, folder in enumerate(subs):
            random_model(folder, with_experts(config, 1, 1), e + 1)
            write_submodel_note(folder, base=base, expert=e, experts=experts, clustering="")
        return {}
    if name == "upcycle":
        from transformers import Qwen2Config

        dense = Qwen2Config(**(QWEN | {"num_hidden_layers": layers}), dtype="bfloat16")
        random_model(root / "dense", dense, 9)
    sources = {"split": [full], "merge": [full, *subs], "upcycle": [root / "dense"]}[name]
    identity(full)  # hashed once; a stage's manifest has it
    started = time.perf_counter()
    if name == "split":
        split(full, 1, out)
    elif name == "merge":
        merge(full, subs, out, original=full)
    else:
        section = Upcycle(experts=experts, top_k=min(2, experts), method="drop")
        upcycle(root / "dense", out, section, seed=0, dtype=torch.bfloat16)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read, written = (
        sum(path.stat().st_size for folder in folders for path in weight_files(folder))
        for folders in (sources, [out])
    )
    read = written if name == "split" else read
    return {
        "read": read,
        "written": written,
        "seconds": seconds,
        "peak": peak,
        "copy": copy(sources, root, read, written),
    }


def copy(sources: list[Path], root: Path, read: int, written: int) -> float:
    """Seconds for reading and writing as many bytes, a megabyte at a time."""
    from disco.tensor_files import weight_files

    paths = [path for folder in sources for path in weight_files(folder)]
    target = root / "copied"
    started = time.perf_counter()
    with open(target, "wb", buffering=0) as sink:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while read > 0 and (piece := file.read(1 << 20)):
                    read -= len(piece)
                    if written > 0:
                        written -= sink.write(piece)
        while written > 0:  # more is written than read
            written -= sink.write(bytes(1 << 20))
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def all_sixty() -> dict:
    """The full configuration on the meta device: keys and shapes of what split and merge would write."""
    from disco.checkpoint import check_keys, expected
    from disco.family import as_submodel, family_of

    started = time.perf_counter()
    config = config_of(60, 24)
    family, shapes = family_of(config), expected(config).shapes
    for submodels in (60, 4):
        size = 60 // submodels
        for first in range(0, 60, size):
            found = {}
            for key, shape in shapes.items():
                role = family.role(key)
                if role.kind == "router":
                    found[key] = (size, *shape[1:])
                elif role.kind == "shared":
                    found[key] = shape
                elif first <= role.expert < first + size:
                    found[role.template.format(e=role.expert - first)] = shape
            check_keys(as_submodel(config, size), found, f"submodel {first // size} of {submodels}")
    parameters = sum(map(_count, shapes.values()))
    return {"parameters": parameters, "keys": len(shapes), "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="where there is room; the system's temporary folder if absent")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(step(options.step, options.folder, options.experts, options.layers)))
        return
    found = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="merge.") as root:
        for name in STEPS:
            size = ["--experts", str(options.experts), "--layers", str(options.layers)]
            command = [sys.executable, __file__, "--step", name, "--folder", root, *size]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    found.pop("make")
    print("| step | read GB | written GB | seconds | copy of as much, seconds | ratio | peak memory GB |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found.items():
        sizes = f"{row['read'] / 1e9:.2f} | {row['written'] / 1e9:.2f}"
        times = f"{row['seconds']:.1f} | {row['copy']:.1f} | {row['seconds'] / row['copy']:.2f}"
        print(f"| {name} | {sizes} | {times} | {row['peak'] / 1e9:.2f} |")
    meta = all_sixty()
    print(
        f"\n60 experts: {meta['parameters'] / 1e9:.2f} B parameters, {meta['keys']:,} tensors: keys and shapes of "
        f"60 and of 4 submodels checked on the meta device in {meta['seconds']:.1f} s"
    )
    if options.json:
        options.json.write_text(json.dumps({"steps": found, "sixty": meta}, indent=1))


if __name__ == "__main__":
    main()
