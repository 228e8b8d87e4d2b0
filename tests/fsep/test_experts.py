"""Sharded experts against Hugging Face's own, in real processes."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fsep
from fsep.families import FAMILIES as SHARDED
from fsep.sharding import sharded_layers
from tests.bcd.ranks import run_ranks
from tests.disco.tiny_models import FAMILIES, tiny_model
from tests.fsep.sharded import (
    EXPERTS,
    RandomLayouts,
    attached,
    compare_gradients,
    compare_training,
    difference,
    loss_of,
    random_layout,
    rank_and_size,
    sequences,
    slice_of,
)

ROUNDING = 1e-5  # fp32, relative to the largest value
FULL = (3, 24, 8)  # matrices, hidden width, expert width of the tiny models


def on_ranks(function, ranks, folder):
    return run_ranks(with_group, ranks, function, folder=folder)


def with_group(function):
    dist.init_process_group("gloo")
    return function()


# --- what runs on each rank ---


def few_cases():
    return {
        "gradients": [
            compare_gradients("qwen2_moe"),
            compare_gradients("qwen2_moe dense layers", checkpointing=True, prefetch=2),
            compare_gradients("mixtral", prefetch=0, delay_reshard=False),
            compare_gradients("olmoe", checkpointing=True, delay_reshard=False),
        ],
        "training": [
            compare_training("qwen2_moe", 10, 2, clip=0.5, accumulation=2),
            compare_training("mixtral", 10, 0, clip=0.5),
            compare_training("olmoe", 10, 1, clip=0.5, checkpointing=True),
        ],
        "bf16": [compare_training("qwen2_moe", 5, stage, dtype="bf16", clip=clip) for stage, clip in BF16],
        "odd tokens": odd_tokens(),
        "layouts": several_layouts(),
        "traffic": traffic(),
        "memory": [memory(prefetch, delay, again) for prefetch, delay, again in MEMORY],
        "refused": refused(),
        "frozen": frozen(),
        "evaluation": evaluation(),
        "late backward": late_backward(),
    }


BF16 = [(2, 0.5), (0, 0.0)]
MEMORY = [(0, False, False), (1, True, False), (2, True, False), (1, True, True)]


def all_cases():
    families = [name for name, (model_type, _) in FAMILIES.items() if model_type in SHARDED]
    return {
        "gradients": [
            compare_gradients(family, checkpointing=checkpointing, prefetch=prefetch, delay_reshard=delay)
            for family in families
            for checkpointing, prefetch, delay in ((False, 1, True), (True, 1, True), (True, 0, False))
        ],
        "training": [
            compare_training(family, 10, stage, clip=0.5, accumulation=1 + stage % 2)
            for family in families
            for stage in (0, 1, 2)
        ],
        "bf16": [compare_training("mixtral", 5, stage, dtype="bf16", clip=clip) for stage, clip in BF16],
        "odd tokens": odd_tokens(),
        "layouts": several_layouts(),
        "traffic": traffic(),
        "memory": [memory(prefetch, delay, again) for prefetch, delay, again in MEMORY],
    }


def odd_tokens():
    """The layer alone: experts without tokens, a rank without tokens, all tokens to one expert, no token at all."""
    rank, ranks = rank_and_size()
    model, dense = attached("mixtral"), tiny_model("mixtral", experts=EXPERTS)
    layer, reference = sharded_layers(model)[0], dense.model.layers[0].mlp.experts
    worst = 0.0
    for tokens, experts in (
        ([7 if r == 0 else 0 for r in range(ranks)], [0, 1]),
        ([3 + r for r in range(ranks)], [2, 4]),
        ([0 for _ in range(ranks)], [0, 1]),
        ([1 for _ in range(ranks)], list(range(EXPERTS))),
    ):
        draw = np.random.default_rng(sum(tokens))
        begin = np.cumsum([0, *tokens])
        own = slice(begin[rank], begin[rank + 1])
        chosen = torch.tensor(
            np.array([draw.choice(experts, 2, replace=False) for _ in range(begin[-1])])
            .reshape(-1, 2)
            .astype(np.int64)
        )
        x, weight = (torch.tensor(draw.normal(size=(begin[-1], n)), dtype=torch.float32) for n in (24, 2))
        mine, mine_weight = x[own].clone().requires_grad_(), weight[own].clone().requires_grad_()
        x.requires_grad_(), weight.requires_grad_()
        layer.zero_grad(), reference.zero_grad()
        found, wanted = layer(mine, chosen[own], mine_weight), reference(x, chosen, weight)
        found.square().sum().backward()
        wanted.square().sum().backward()
        pairs = [(found, wanted[own]), (mine.grad, x.grad[own]), (mine_weight.grad, weight.grad[own])]
        if begin[-1]:
            gradients = (reference.gate_up_proj.grad, reference.down_proj.grad)
            pairs.append((layer.shard.grad, slice_of(*gradients, layer.shard.shape)))
        else:
            assert not layer.shard.grad.any()
        worst = max([worst, *(difference(a, b) for a, b in pairs if a.numel())])
    return worst


def several_layouts():
    """Losses and gradients of one batch under several layouts: the largest differences; and of one, twice."""
    rank, ranks = rank_and_size()
    ids, begin = sequences(0, ranks)
    found = []
    for seed in (0, 1, 2, 2):
        model = attached("qwen2_moe", RandomLayouts(2, EXPERTS, ranks, EXPERTS, seed))
        loss = loss_of(model, ids[begin[rank] : begin[rank + 1]], 10)
        loss.backward()
        found.append([loss.detach()] + [parameter.grad for parameter in model.parameters()])
    first, *others, again = found
    return {
        "other": max(difference(a, b) for other in others for a, b in zip(other, first, strict=True)),
        "same bits": all(torch.equal(a, b) for a, b in zip(again, others[-1], strict=True)),
    }


def full_slots(ranks):
    return EXPERTS if ranks == 1 else 3


def traffic():
    """Bytes counted at the collective itself and by the link, for one forward and backward; and the formula's."""
    rank, ranks = rank_and_size()
    slots, draw = full_slots(ranks), np.random.default_rng(0)
    layouts = [random_layout(draw, EXPERTS, ranks, slots, full=True) for _ in range(2)]
    model = tiny_model("qwen2_moe", experts=EXPERTS).train()
    fsep.attach(model, slots=slots, planner=layouts)
    run = sharded_layers(model)[0].runtime
    seen, real = {"weights": 0, "tokens": 0}, dist.all_to_all_single

    def counting(output, input, received, sent, group=None, **more):
        name = "weights" if group is run.weights.group else "tokens"
        seen[name] += (sum(sent) - sent[rank]) * input[:1].numel() * input.element_size()
        return real(output, input, received, sent, group=group, **more)

    dist.all_to_all_single = counting
    try:
        ids, begin = sequences(0, ranks)
        loss_of(model, ids[begin[rank] : begin[rank + 1]], 1).backward()
    finally:
        dist.all_to_all_single = real
    P = np.prod(FULL)
    # Two layers: unshard forward, unshard backward, reshard, each C P (N - 1) / N values with P rounded up.
    formula = 2 * 3 * slots * -(-P // ranks) * (ranks - 1) * 4
    out = back = 0
    for record in run.records.values():
        mine = record.layout.copies.device == rank
        out += record.tokens_NP[rank, ~mine].sum()
        back += record.tokens_NP[:, mine].sum() - record.tokens_NP[rank, mine].sum()
    # Dispatch and combine's backward send this rank's rows out, the other two send those of others back.
    wanted = 2 * (out + back) * 24 * 4
    return {"seen": seen, "formula": int(formula), "tokens": int(wanted), "link": dict(run.weights.sent)}


def memory(prefetch, delay, checkpointing):
    """Most rebuilt values and gradients alive, in layers of C experts, over three steps; and what is left over."""
    ranks = dist.get_world_size()
    slots, draw = full_slots(ranks), np.random.default_rng(0)
    model = tiny_model("qwen2_moe", experts=EXPERTS, num_hidden_layers=4).train()
    layouts = [random_layout(draw, EXPERTS, ranks, slots, full=True) for _ in range(4)]
    fsep.attach(model, slots=slots, planner=layouts, prefetch=prefetch, delay_reshard=delay)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run = sharded_layers(model)[0].runtime
    S = sharded_layers(model)[0].shard.shape[1]
    with Living((slots, ranks, S), (slots, ranks * S), (slots * ranks, S)) as living:
        for step in range(3):
            loss_of(model, sequences(step, ranks, rows=2)[0], 1).backward()
    size = slots * ranks * S
    return {
        "weights": run.rebuilder.meter.peak / size,
        "gradients": run.gradients.peak / size,
        "alive": living.peak,
        "left": run.rebuilder.meter.now + run.gradients.now,
    }


class Living(torch.utils._python_dispatch.TorchDispatchMode):
    """The most storages that were ever alive together, of tensors first seen in one of ``shapes``."""

    def __init__(self, *shapes):
        super().__init__()
        self._shapes, self._alive, self.peak = shapes, {}, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        if isinstance(out, torch.Tensor) and tuple(out.shape) in self._shapes:
            storage = out.untyped_storage()
            self._alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
            self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
            self.peak = max(self.peak, len(self._alive))
        return out


def refused():
    """Messages of what attach, the engine and a forward pass refuse."""
    rank, ranks = rank_and_size()
    draw = np.random.default_rng(0)
    other = random_layout(draw, EXPERTS, ranks + 1, 5)
    differing = [random_layout(np.random.default_rng(rank), EXPERTS, ranks, 4) for _ in range(2)]
    llama = tiny_model("qwen2_moe", experts=EXPERTS, mlp_only_layers=[0, 1])
    plain = tiny_model("qwen2_moe", experts=EXPERTS)
    plain.config.model_type = "gpt2"
    half = tiny_model("mixtral", experts=EXPERTS)
    half.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    ids = torch.ones((1, 4), dtype=torch.long)
    with torch.device("meta"):
        empty = tiny_model_on_meta()
    calls = {
        "not gpt2": lambda: fsep.attach(plain, slots=5),
        "no experts": lambda: fsep.attach(llama, slots=5),
        "no config": lambda: fsep.attach(torch.nn.Linear(2, 2), slots=5),
        "few slots": lambda: fsep.attach(tiny_model("mixtral", experts=EXPERTS), slots=EXPERTS // ranks),
        "twice": lambda: fsep.attach(attached("mixtral"), slots=5),
        "half frozen": lambda: fsep.attach(half, slots=5),
        "topology": lambda: fsep.attach(plain_mixtral(), slots=5, topology=fsep.Topology(ranks + 1)),
        "prefetch": lambda: attached("mixtral", prefetch=-1),
        "timeout": lambda: attached("mixtral", timeout_s=0),
        "layouts": lambda: attached("mixtral", [other] * 2)(input_ids=ids),
        "count": lambda: attached("mixtral", differing[:1])(input_ids=ids),
        "differing": lambda: attached("mixtral", differing)(input_ids=ids),
        "meta": lambda: (
            fsep.attach(empty, slots=5).model.layers[0].mlp.experts(torch.ones(1, 24), ids[:, :2], ids[:, :2])
        ),
        "stage 3": lambda: compare_training("mixtral", 1, 3),
        "clip bf16": lambda: compare_training("mixtral", 1, 0, dtype="bf16", clip=1.0),
        "no layers": lambda: sharded_layers(plain_mixtral()),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)
    return messages


def plain_mixtral():
    return tiny_model("mixtral", experts=EXPERTS)


def tiny_model_on_meta():
    from transformers import AutoModelForCausalLM

    from tests.disco.tiny_models import tiny_config

    return AutoModelForCausalLM.from_config(tiny_config("mixtral", experts=EXPERTS))


def frozen():
    """Frozen experts get no gradient, and what lies below them the right one."""
    rank, ranks = rank_and_size()
    model, dense = tiny_model("olmoe", experts=EXPERTS).train(), tiny_model("olmoe", experts=EXPERTS).train()
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(False)
    fsep.attach(model, slots=5, planner=RandomLayouts(2, EXPERTS, ranks, 5))
    ids, begin = sequences(0, ranks)
    loss_of(model, ids[begin[rank] : begin[rank + 1]], 1).backward()
    loss_of(dense, ids, 1).backward()
    below = model.model.layers[0].self_attn.q_proj.weight.grad
    dist.all_reduce(below)
    shards = [layer.shard.grad for layer in sharded_layers(model)]
    return {"shards": shards, "below": difference(below, dense.model.layers[0].self_attn.q_proj.weight.grad)}


def evaluation():
    """The planner hears of training alone, and gradients are no business of evaluation."""
    ranks = dist.get_world_size()
    planner = RandomLayouts(2, EXPERTS, ranks, 5)
    model, dense = attached("qwen2_moe", planner), tiny_model("qwen2_moe", experts=EXPERTS).eval()
    ids = sequences(0, ranks)[0]
    model.eval()
    with torch.no_grad():
        worst = max(difference(model(input_ids=ids).logits, dense(input_ids=ids).logits) for _ in range(3))
    heard = len(planner.observed)
    model.train()
    for _ in range(3):
        model(input_ids=ids)
    counts = planner.observed[1:]
    return {"logits": worst, "heard": heard, "then": len(counts), "tokens": [int(c.sum()) for c in counts]}


def late_backward():
    """Two forward passes, then both backwards, with recomputation; and what lives on after ten ordinary steps."""
    import gc

    rank, ranks = rank_and_size()
    model, dense = attached("mixtral"), tiny_model("mixtral", experts=EXPERTS).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    run = sharded_layers(model)[0].runtime
    losses, wanted = [], []
    for step in range(3):
        ids, begin = sequences(step, ranks)
        losses.append(loss_of(model, ids[begin[rank] : begin[rank + 1]], 1))
        wanted.append(loss_of(dense, ids, 1))
    held = run.current.version
    losses[1].backward()
    loss_of(model, ids[begin[rank] : begin[rank + 1]], 1)
    (losses[0] + losses[2]).backward()
    sum(wanted).backward()
    reference = dense.model.layers[0].mlp.experts
    gradients = (reference.gate_up_proj.grad, reference.down_proj.grad)
    layer = sharded_layers(model)[0]
    worst = difference(layer.shard.grad, slice_of(*gradients, layer.shard.shape))
    losses.clear()
    for step in range(10):
        loss_of(model, sequences(step, ranks)[0], 1).backward()
    gc.collect()
    return {"gradient": worst, "held": held, "moved": run.current.version - held, "alive": len(run._passes)}


# --- the tests ---


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(few_cases, 2, tmp_path_factory.mktemp("ranks"))


def check_numbers(results):
    for found in results:
        for case in found["gradients"]:
            assert max(case.values()) < ROUNDING, case
        for case in found["training"]:
            # Ten AdamW steps widen what rounding began.
            assert case["loss"] < ROUNDING and max(case["norm"], case["weights"]) < 1e-4, case
        for case in found["bf16"]:
            assert case["loss"] < 0.03, case
        assert found["odd tokens"] < ROUNDING
        assert found["layouts"]["other"] < 1e-6 and found["layouts"]["same bits"]
        sent = found["traffic"]
        assert sent["seen"]["weights"] == sent["formula"] == sum(sent["link"].values())
        assert sent["seen"]["tokens"] == sent["tokens"]
        for (prefetch, delay, _), case in zip(MEMORY, found["memory"], strict=True):
            assert case["weights"] == min(prefetch, 3) + 1
            assert case["gradients"] == 1 + delay
            assert case["left"] == 0
            if len(results) > 1:  # on one rank the shards themselves have that shape
                # Counted by PyTorch itself; gradients are sent from one buffer and received in another.
                assert case["weights"] <= case["alive"] <= case["weights"] + 2 * case["gradients"], case


def test_two_ranks_equal_the_dense_model(two):
    check_numbers(two)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_families_stages_and_sizes(ranks, tmp_path):
    check_numbers(on_ranks(all_cases, ranks, tmp_path))


@pytest.mark.parametrize(
    "case, words",
    {
        "not gpt2": "model_type 'gpt2' is not",
        "no experts": "no MoE layer",
        "no config": "Linear has no config.model_type",
        "few slots": "slots is 2: 2 devices then hold 4 experts of 5; give at least 3",
        "twice": "is sharded already",
        "half frozen": "freeze both or none",
        "topology": "topology.devices is 3 but there are 2 ranks",
        "prefetch": "prefetch is -1",
        "timeout": "timeout_s is 0",
        "layouts": "5 experts on 3 devices",
        "count": "gives 1 layouts but the model has 2",
        "differing": "ranks 0 and 1 give different layouts",
        "meta": "holds no weights",
        "stage 3": "zero_optimization.stage is 3",
        "clip bf16": "use stage 1 or 2",
        "no layers": "no sharded experts",
    }.items(),
)
def test_refusals_say_what_and_why(two, case, words):
    assert all(words in found["refused"].get(case, "nothing") for found in two)


def test_layouts_wait_for_backward_and_nothing_is_leaked(two):
    for found in two:
        case = found["late backward"]
        assert case["gradient"] < ROUNDING
        assert case["held"] == 0 and case["moved"] >= 9
        assert case["alive"] <= 2


def test_frozen_experts(two):
    for found in two:
        assert found["frozen"]["shards"] == [None, None]
        assert found["frozen"]["below"] < ROUNDING


def test_evaluation_is_not_planned_for(two):
    for found in two:
        assert found["evaluation"]["logits"] < ROUNDING
        assert (found["evaluation"]["heard"], found["evaluation"]["then"]) == (0, 2)
        assert found["evaluation"]["tokens"] == [6 * 6 * 2 * 2] * 2  # sequences, length, top-k, layers


# --- ranks that go away ---


LIMIT = {"hangs": 8.0, "dies": 60.0}  # seconds; connecting has to fit in, on a busy machine too


def leave(rank, port, folder):
    """Rank 1 first does nothing for longer than the limit, then dies; rank 0 notes what it is told, and when."""
    import os

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    notes = []
    for case in LIMIT:
        model = attached("mixtral", timeout_s=LIMIT[case])
        model(input_ids=torch.ones((1, 4), dtype=torch.long))
        if rank == 1:
            if case == "dies":
                os._exit(7)
            store_wait(folder)
            continue
        started = time.monotonic()
        try:
            model(input_ids=torch.ones((1, 4), dtype=torch.long))
        except fsep.RankError as error:
            notes.append((str(error), time.monotonic() - started))
        open(f"{folder}/noted", "w").close()
    torch.save(notes, f"{folder}/notes.pt")
    os._exit(0)


def store_wait(folder):
    import os

    until = time.monotonic() + 60
    while not os.path.exists(f"{folder}/noted") and time.monotonic() < until:
        time.sleep(0.1)


def test_a_rank_that_hangs_or_dies_is_reported_in_time(tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=leave, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 7]
    for (message, seconds), limit in zip(torch.load(tmp_path / "notes.pt"), LIMIT.values(), strict=True):
        assert "rank 0 of 2: load of model.layers.0.mlp.experts failed" in message
        assert f"limit {limit:g} s" in message and "another rank has died" in message
        assert seconds < 40
