"""Tokens a second of our training loop against a plain PyTorch loop and the transformers Trainer.

    python benchmarks/trainer.py --rounds 5 --steps 40 --threads 2

Same model, rows, batch, optimizer, clipping and threads. Each arm runs in a process of its own, arms take turns,
the median over rounds counts; start-up is left out for all. The Trainer needs the package accelerate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# bcd.py lies beside this file: keep it from hiding the package.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent] + ["."]

ARMS = ("ours", "plain", "trainer")
MODEL = {
    "model_type": "qwen2_moe",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "intermediate_size": 256,
    "vocab_size": 4096,
}


def make_inputs(folder: Path, steps: int, batch: int, length: int) -> None:
    """A start model and rows of random tokens, one document a row, which is what the others can do too."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from disco.artifacts import file_hash
    from disco.packing import Rows

    torch.manual_seed(0)
    raw = dict(MODEL)
    config = CONFIG_MAPPING[raw.pop("model_type")](**raw)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    count = steps * batch
    path = folder / "rows.tokens"
    np.random.default_rng(0).integers(0, MODEL["vocab_size"], count * (length + 1)).astype(np.uint16).tofile(path)
    Rows(
        tokens_path=path,
        tokens_sha256=file_hash(path),
        dtype=np.dtype(np.uint16),
        sequence_length=length,
        pad=0,
        pointer=np.arange(count + 1),
        start=np.arange(count) * (length + 1),
        length=np.full(count, length),
        document=np.arange(count),
    ).save(folder / "rows.npz")


def ours(folder: Path, batch: int) -> float:
    """Seconds that our loop took for all rows, as it wrote them down itself."""
    from disco.artifacts import SCRATCH
    from disco.config import Optimizer, Tracking
    from disco.job import Job, Price
    from disco.trainer import train

    with tempfile.TemporaryDirectory(dir=folder) as run:
        out = Path(run) / "out"
        (out / SCRATCH).mkdir(parents=True)
        train(
            Job(
                phase="benchmark",
                stage="train",
                model=str(folder / "model"),
                out=str(out),
                rows=str(folder / "rows.npz"),
                section=Optimizer(batch_size=batch, learning_rate=1e-4, log_every=10, checkpoint_every=0),
                dtype="float32",
                experts="grouped_mm",
                seed=0,
                price=Price(priced_as="cpu", dollars_per_hour=0, source="benchmark", as_of="-"),
                run=run,
                group="benchmark",
                tracking=Tracking(wandb="disabled"),
            )
        )
        last = (Path(run) / "metrics.jsonl").read_text().splitlines()[-1]
        return json.loads(last)["seconds"]


def plain(folder: Path, batch: int) -> float:
    """A loop as one would write it: whole logits, PyTorch's cross-entropy, AdamW."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from disco.packing import Rows

    rows = Rows.load(folder / "rows.npz")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.perf_counter()
    for begin in range(0, len(rows), batch):
        inputs = rows.batch(np.arange(begin, begin + batch))
        logits = model(input_ids=inputs["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if begin // batch % 10 == 0:
            loss.item()
    return time.perf_counter() - started


def trainer(folder: Path, batch: int) -> float:
    """The transformers Trainer with its default optimizer."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from disco.packing import Rows

    rows = Rows.load(folder / "rows.npz")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            ids = rows.batch([index])["input_ids"][0]
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch,
        learning_rate=1e-4,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_steps=len(rows) // batch,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    run = Trainer(model=model, args=arguments, train_dataset=Data())
    started = time.perf_counter()
    run.train()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps({"seconds": globals()[options.arm](options.folder, options.batch)}))
        return
    tokens = options.steps * options.batch * options.length
    speeds = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, options.steps, options.batch, options.length)
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu"}
        for round_ in range(options.rounds):
            for arm in ARMS:
                command = [sys.executable, __file__, "--arm", arm, "--folder", name, "--batch", str(options.batch)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{arm} failed:\n{done.stderr[-2000:]}")
                seconds = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
                speeds[arm].append(tokens / seconds)
                print(f"round {round_ + 1}  {arm:<8} {tokens / seconds:9,.0f} tokens/s", flush=True)
    medians = {arm: statistics.median(values) for arm, values in speeds.items()}
    print(f"\n| loop | tokens/s (median of {options.rounds}) | ours / theirs |\n|---|---|---|")
    for arm in ARMS:
        print(f"| {arm} | {medians[arm]:,.0f} | {medians['ours'] / medians[arm]:.3f} |")
    if options.json:
        result = {"speeds": speeds, "medians": medians, **vars(options)}
        options.json.write_text(json.dumps(result, default=str, indent=1))


if __name__ == "__main__":
    main()
