"""Resuming at the same and at other numbers of ranks, in real processes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import fsep
from tests.bcd.ranks import run_ranks
from tests.fsep.sharded import EXPERTS, SLOTS, attached, random_layout, start_engine, train

CASES = {  # name: (family, ZeRO stage, precision, accumulation)
    "zero 2 bf16": ("qwen2_moe", 2, "bf16", 2),
    "zero 1": ("mixtral", 1, "fp32", 1),
    "zero 0": ("olmoe", 0, "fp32", 1),
    "zero 0 bf16": ("qwen2_moe", 0, "bf16", 1),
}


def start(case):
    family, stage, dtype, accumulation = CASES[case]
    draw, ranks = np.random.default_rng(0), dist.get_world_size()
    layouts = [random_layout(draw, EXPERTS, ranks, SLOTS) for _ in range(2)]
    return start_engine(attached(family, layouts), stage, dtype=dtype, accumulation=accumulation, clip=0.0)


def weights(engine):
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def straight_and_resumed(folder):
    """Three steps, a checkpoint, two steps; the same from the checkpoint; and by DeepSpeed's own save and load."""
    dist.init_process_group("gloo")
    found = {}
    for number, case in enumerate(CASES):
        engine = start(case)
        train(engine, 3)
        path = fsep.save_checkpoint(engine, f"{folder}/{number}", client_state={"step": 3})
        engine.save_checkpoint(f"{folder}/deepspeed{number}", tag="three")
        losses, after = train(engine, 2, first=3), weights(engine)
        again = start(case)
        train(again, 1, first=50)
        where, client = fsep.load_checkpoint(again, f"{folder}/{number}")
        steps = again.global_steps
        resumed = train(again, 2, first=3)
        found[case] = {
            "same": same(after, weights(again)) and losses == resumed,
            "told": (client, steps, str(where) == str(path)),
        }
        fresh = start(case)
        fresh.load_checkpoint(f"{folder}/deepspeed{number}", tag="three")
        found[case]["deepspeed"] = train(fresh, 2, first=3) == losses and same(after, weights(fresh))
    found["refused"] = refusals(folder)
    return found


def refusals(folder):
    rank = dist.get_rank()
    if rank == 0:
        for name in ("short", "lost", "old"):
            shutil.copytree(f"{folder}/1", f"{folder}/{name}")
        (file,) = list(_path(f"{folder}/short").glob("rank-00001*"))
        with open(file, "r+b") as handle:
            handle.truncate(file.stat().st_size - 1)
        next(_path(f"{folder}/lost").glob("rank-00000*")).unlink()
        manifest = _path(f"{folder}/old") / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    dist.barrier()
    engine = start("zero 1")
    other_model = attached("qwen2_moe", experts=EXPERTS + 1).state_dict()
    frozen = attached("mixtral")
    frozen.lm_head.weight.requires_grad_(False)
    frozen = start_engine(frozen, 1)
    sixteen = start_engine(attached("mixtral"), 1, dtype="bf16", accumulation=2)
    train(engine, 1)
    before, states = weights(engine), [None] * 2
    dist.all_gather_object(states, engine.module.state_dict())
    calls = [
        lambda: fsep.load_checkpoint(engine, f"{folder}/short"),
        lambda: fsep.load_checkpoint(engine, f"{folder}/lost"),
        lambda: fsep.load_checkpoint(engine, f"{folder}/old"),
        lambda: fsep.load_checkpoint(engine, folder),
        lambda: fsep.load_checkpoint(engine, f"{folder}/1", tag="global_step9"),
        lambda: fsep.load_checkpoint(engine, f"{folder}/0"),
        lambda: fsep.load_checkpoint(frozen, f"{folder}/1"),
        lambda: fsep.load_checkpoint(start_engine(attached("mixtral"), 0), f"{folder}/0"),
        lambda: half_way(sixteen, folder),
        lambda: fsep.save_checkpoint(engine, f"{folder}/tag", tag="../up"),
        lambda: full_disk(engine, folder),
        lambda: engine.module.load_state_dict(states[1 - rank]),
        lambda: engine.module.load_state_dict({**states[rank], **other_experts(other_model)}),
        lambda: engine.module.load_state_dict({}),
    ]
    messages = []
    for call in calls:
        try:
            call()
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return {"messages": messages, "untouched": same(before, weights(engine))}


def _path(folder):
    (found,) = [path for path in Path(folder).iterdir() if path.is_dir()]
    return found


def other_experts(state):
    return {name: value for name, value in state.items() if "deepspeed_experts" in name}


def half_way(engine, folder):
    engine.backward(engine(input_ids=torch.ones((1, 4), dtype=torch.long)).logits.float().square().mean())
    engine.step()
    fsep.save_checkpoint(engine, f"{folder}/half")


def full_disk(engine, folder):
    def fails(*_, **__):
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("fsep.files.save_file", fails)
        fsep.save_checkpoint(engine, f"{folder}/1", tag="global_step3")


def load_and_save(source, target):
    """At whatever number of ranks: load, save, and two more steps."""
    dist.init_process_group("gloo")
    found = {}
    for number, case in enumerate(CASES):
        engine = start(case)
        fsep.load_checkpoint(engine, f"{source}/{number}")
        fsep.save_checkpoint(engine, f"{target}/{number}", client_state={"from": source})
        found[case] = weights(engine)
    return found


def train_and_save(target):
    dist.init_process_group("gloo")
    for number, case in enumerate(CASES):
        engine = start(case)
        train(engine, 2)
        fsep.save_checkpoint(engine, f"{target}/{number}")


def assembled(folder):
    """All states in full, and every coordinate there exactly once."""
    path = _path(folder)
    manifest = json.loads((path / "manifest.json").read_text())
    full, times = {}, {}
    for name, file in manifest["files"].items():
        tensors = load_file(path / name) if file["parts"] else {}
        for parameter, state, start_, stop, key in file["parts"]:
            rows, size = manifest["parameters"][parameter]
            whole = full.setdefault((parameter, state), torch.empty(rows, size, dtype=tensors[key].dtype))
            whole[:, start_:stop] = tensors[key]
            times.setdefault((parameter, state), torch.zeros(size, dtype=torch.int))[start_:stop] += 1
    assert all((count == 1).all() for count in times.values())
    return full, manifest["scalars"], manifest["options"], manifest["counters"]


def check_same_state(first, second):
    assert first[1:] == second[1:]
    assert same(first[0], second[0])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_ranks(straight_and_resumed, 2, str(folder), folder=folder)


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_the_straight_one_bit_for_bit(two, case):
    for found in two[1]:
        assert found[case]["same"]
        assert found[case]["told"] == ({"step": 3}, 3, True)


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_own_checkpoint_is_exact_too(two, case):
    assert all(found[case]["deepspeed"] for found in two[1])


@pytest.mark.parametrize(
    "number, words",
    enumerate(
        [
            "the checkpoint is damaged",
            "has None bytes",
            "has format 0: this version reads 1",
            "has no file `latest`",
            "is no whole checkpoint",
            "is of another model",
            "lm_head.weight is trained there but not here",
            "is of another model",
            "1 of 2 micro-batches are accumulated",
            "give a plain name",
            "rank 1 could not write",
            "the state has slice",
            "the state has shape",
            "deepspeed_experts.0.shard",
        ]
    ),
)
def test_refusals_change_nothing(two, number, words):
    for found in two[1]:
        assert words in found["refused"]["messages"][number]
        assert found["refused"]["untouched"]


def test_one_rank_takes_over_from_two(two, tmp_path):
    run_ranks(load_and_save, 1, str(two[0]), str(tmp_path / "one"), folder=tmp_path)
    for number in range(len(CASES)):
        check_same_state(assembled(two[0] / str(number)), assembled(tmp_path / "one" / str(number)))


@pytest.mark.slow
def test_four_ranks_to_two_to_three_to_four(tmp_path):
    run_ranks(train_and_save, 4, str(tmp_path / "4"), folder=tmp_path)
    found = {}
    for before, now in (("4", "2"), ("2", "3"), ("3", "4again")):
        found[now] = run_ranks(
            load_and_save, int(now[0]), str(tmp_path / before), str(tmp_path / now), folder=tmp_path
        )
    for number in range(len(CASES)):
        states = [assembled(tmp_path / name / str(number)) for name in ("4", "2", "3", "4again")]
        for state in states[1:]:
            check_same_state(states[0], state)
