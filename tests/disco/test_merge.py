import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint, identity
from disco.config import ConfigError
from disco.family import moe_blocks, num_experts, renormalizes, routed_like
from disco.merge import average, merge
from disco.split import split, write_submodel_note
from tests.disco.tiny_models import (
    DTYPES,
    FAMILIES,
    load,
    same_bits,
    same_tensors,
    save,
    tiny_config,
    tiny_model,
    tiny_single,
)


def split_all(full, root, experts, **keys):
    folders = []
    for expert in range(experts):
        out = root / f"sub{expert}"
        split(full, expert, out, **keys)
        folders.append(out)
    return folders


def merged(tmp_path, start, submodels, name="merged", **keys):
    out = tmp_path / name
    merge(start, submodels, out, **keys)
    return out


def perturb(folder, seed, scale=0.1):
    """Stand in for training: move every weight of a submodel."""
    generator = torch.Generator().manual_seed(seed)
    for stored in Checkpoint.open(folder).tensors.values():
        values = stored.read()
        stored.write((values + scale * torch.randn(values.shape, generator=generator)).to(values.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_split_then_merge_gives_back_every_bit(tmp_path, name, dtype):
    model = tiny_model(name, 5, dtype)
    full = save(model, tmp_path / "full")
    out = merged(tmp_path, full, split_all(full, tmp_path, 5), original=full)
    before, after = Checkpoint.open(full), Checkpoint.open(out)
    assert same_tensors(
        {key: stored.read() for key, stored in before.tensors.items()},
        {key: stored.read() for key, stored in after.tensors.items()},
    )
    assert same_tensors(model.state_dict(), load(out).state_dict())
    assert (out / "config.json").read_text() == (full / "config.json").read_text()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_routers_keep_the_dtype_that_they_have_on_disk(tmp_path, name):
    """Transformers holds DeepSeek's routers in float32; released checkpoints hold them in bfloat16."""
    full = save(tiny_model(name, 3).to(torch.bfloat16), tmp_path / "full")
    out = merged(tmp_path, full, split_all(full, tmp_path, 3), original=full)
    before, after = Checkpoint.open(full).tensors, Checkpoint.open(out).tensors
    assert all(stored.dtype == "BF16" for stored in before.values())
    assert all(same_bits(stored.read(), after[key].read()) for key, stored in before.items())


@pytest.mark.parametrize("experts", [1, 3, 7, 24])
def test_round_trip_with_odd_numbers_of_experts(tmp_path, experts):
    model = tiny_model("qwen2_moe dense layers", experts, num_experts_per_tok=1)
    full = save(model, tmp_path / "full")
    out = merged(tmp_path, full, split_all(full, tmp_path, experts), original=full)
    assert same_tensors(model.state_dict(), load(out).state_dict())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("router", ["original", "random"])
def test_permuting_submodels_permutes_experts_and_router_rows(tmp_path, name, router):
    full = save(tiny_model(name, 3), tmp_path / "full")
    folders = split_all(full, tmp_path, 3)
    for seed, folder in enumerate(folders):
        perturb(folder, seed)
    order = [2, 0, 1]
    keys = dict(original=full if router == "original" else None, seed=4)
    weights = [0.5, 0.2, 0.3]
    a = load(merged(tmp_path, full, folders, "a", weights=weights, **keys))
    b = load(merged(tmp_path, full, [folders[i] for i in order], "b", weights=[weights[i] for i in order], **keys))
    permuted = {}
    for block in moe_blocks(a):
        for module in (block.router, block.experts):
            for parameter in module.parameters():
                permuted[parameter] = parameter.detach()[order]
    for (_, left), (_, right) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert same_bits(permuted.get(left, left.detach()), right.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_trained_submodels_experts_kept_shared_part_averaged(tmp_path, name, dtype):
    full = save(tiny_model(name, 3, dtype), tmp_path / "full")
    folders = split_all(full, tmp_path, 3)
    for seed, folder in enumerate(folders):
        perturb(folder, seed)
    out = Checkpoint.open(merged(tmp_path, full, folders, weights=[1, 2, 5], original=full))
    base = Checkpoint.open(full)
    subs = [Checkpoint.open(folder) for folder in folders]
    kinds = set()
    for key, stored in out.tensors.items():
        role = out.family.role(key)
        kinds.add(role.kind)
        if role.kind == "expert":
            wanted = subs[role.expert].tensors[role.template.format(e=0)].read()
        elif role.kind == "router":
            wanted = base.tensors[key].read()
        else:
            anchor = base.tensors[key].read().double()
            wanted = anchor.clone()
            for sub, weight in zip(subs, [0.125, 0.25, 0.625], strict=True):
                wanted += weight * (sub.tensors[key].read().double() - anchor)
            wanted = wanted.to(base.tensors[key].read().dtype)
        assert same_bits(stored.read(), wanted), key
    assert kinds == {"shared", "router", "expert"}
    assert renormalizes(out.config) == renormalizes(base.config)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
four = st.lists(numbers, min_size=4, max_size=4)
shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def raw(values):
    return bytearray(np.array(values, np.float32).tobytes())


@settings(deadline=None)
@given(base=four, theta=four, weights=shares)
def test_average_of_identical_tensors_is_that_tensor(base, theta, weights):
    weights = [weight / sum(weights) for weight in weights]
    assert bytes(average(raw(base), [raw(theta) for _ in weights], weights, "F32")) == bytes(raw(theta))


@settings(deadline=None)
@given(base=four, thetas=st.lists(four, min_size=2, max_size=5), data=st.data())
def test_average_is_the_exact_mean_rounded_once(base, thetas, data):
    """Against exact rational arithmetic; values of like size, so that float64 has digits to spare."""
    values = np.array([base, *thetas], np.float32)
    values = np.where(np.abs(values) < 1e-3, 0.5, np.clip(values, -1e3, 1e3)).astype(np.float32)
    parts = data.draw(st.lists(st.integers(1, 9), min_size=len(thetas), max_size=len(thetas)))
    weights = [part / sum(parts) for part in parts]
    found = average(raw(values[0]), [raw(theta) for theta in values[1:]], weights, "F32")
    for column, got in enumerate(np.frombuffer(found, np.float32)):
        total = sum(Fraction(float(value)) * part for value, part in zip(values[1:, column], parts, strict=True))
        exact = float(total / sum(parts))
        assert abs(float(got) - exact) <= np.spacing(np.float32(abs(exact))) / 2 + 1e-12


@pytest.mark.parametrize("name", FAMILIES)
def test_submodels_of_a_single_expert_start(tmp_path, name):
    start = save(tiny_single(name), tmp_path / "start")
    folders = []
    for expert in range(5):
        folder = shutil.copytree(start, tmp_path / f"sub{expert}")
        perturb(folder, expert)
        write_submodel_note(folder, base=identity(start), expert=expert, experts=5, clustering="c")
        folders.append(folder)
    config = routed_like(Checkpoint.open(start).config, tiny_config(name, 5))
    out = merged(tmp_path, start, folders, full_config=config, seed=1)
    model = load(out)
    assert num_experts(model.config) == 5
    assert renormalizes(model.config) == (not name.startswith("deepseek_v2"))
    for block in moe_blocks(model):
        for parameter in block.experts.parameters():
            assert parameter.shape[0] == 5
        std = block.router.weight.std().item()
        assert std == pytest.approx(config.initializer_range, rel=0.3)
    again = merged(tmp_path, start, folders, "again", full_config=config, seed=1)
    other = merged(tmp_path, start, folders, "other", full_config=config, seed=2)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, again, other)]
    assert weights[0] == weights[1] != weights[2]
    with pytest.raises(ConfigError, match="has 1 experts, not 5: set merge.router=probe"):
        merged(tmp_path, start, folders, "none", full_config=config, original=start)


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "gpt_oss", "deepseek_v2 grouped", "deepseek_v3"])
def test_groups_split_then_merged_give_back_every_bit(tmp_path, name):
    model = tiny_model(name, 7, torch.bfloat16)
    full = save(model, tmp_path / "full")
    folders = [tmp_path / str(index) for index in range(3)]
    for index, folder in enumerate(folders):
        split(full, index, folder, submodels=3)
    out = merged(tmp_path, full, folders, original=full)
    assert same_tensors(model.state_dict(), load(out).state_dict())
    assert (out / "config.json").read_text() == (full / "config.json").read_text()
    own = load(merged(tmp_path, full, folders, "own", own_rows=True))
    for before, after in zip(moe_blocks(model), moe_blocks(own), strict=True):
        assert same_bits(before.router.weight.detach(), after.router.weight.detach())


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_one_expert_is_cloned_into_its_group(tmp_path, name, noise):
    start = save(tiny_single(name), tmp_path / "start")
    folders, groups = [], [[0, 1, 2], [3, 4]]
    for index, group in enumerate(groups):
        folder = shutil.copytree(start, tmp_path / f"sub{index}")
        perturb(folder, index)
        write_submodel_note(folder, base=identity(start), expert=index, experts=2, clustering="c", group=group)
        folders.append(folder)
    config = routed_like(Checkpoint.open(start).config, tiny_config(name, 5))
    model = load(merged(tmp_path, start, folders, full_config=config, clone_noise=noise, own_rows=True))
    for layer, block in enumerate(moe_blocks(model)):
        for folder, group in zip(folders, groups, strict=True):
            mine = dict(moe_blocks(load(folder))[layer].experts.named_parameters())
            for key, stacked in block.experts.named_parameters():
                trained = mine[key][0]
                assert same_bits(stacked[group[0]].detach(), trained.detach())
                for clone in group[1:]:
                    moved = (stacked[clone] - trained).std().item()
                    assert moved == (pytest.approx(noise * trained.std().item(), rel=0.5) if noise else 0)


@pytest.mark.parametrize(
    "router, renormalize, wanted",
    [("random", None, True), ("random", False, False), ("original", None, False), ("original", True, True)],
)
def test_renormalize(tmp_path, router, renormalize, wanted):
    full = save(tiny_model("qwen2_moe", 3), tmp_path / "full")
    original = full if router == "original" else None
    out = merged(tmp_path, full, split_all(full, tmp_path, 3), original=original, renormalize=renormalize)
    assert Checkpoint.open(out).config.norm_topk_prob is wanted


def test_shards(tmp_path):
    model = tiny_model("mixtral", 3)
    full = save(model, tmp_path / "full")
    folders = split_all(full, tmp_path, 3, max_shard_bytes=9000)
    out = merged(tmp_path, full, folders, original=full, max_shard_bytes=9000)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 3 and (out / "model.safetensors.index.json").is_file()
    assert not (out / "model.safetensors").exists()
    assert all(path.stat().st_size < 12_000 for path in shards)
    assert same_tensors(model.state_dict(), load(out).state_dict())


class TestRefused:
    @pytest.fixture
    def full(self, tmp_path):
        return save(tiny_model("qwen2_moe", 3), tmp_path / "full")

    @pytest.fixture
    def folders(self, tmp_path, full):
        return split_all(full, tmp_path, 3, clustering="one")

    def refuse(self, tmp_path, full, folders, match, error=ArtifactError, **keys):
        out = tmp_path / "out"
        with pytest.raises(error, match=match):
            merge(full, folders, out, **keys)
        assert not list(out.glob("*.safetensors"))

    def test_other_base(self, tmp_path, full, folders):
        other = save(tiny_model("qwen2_moe", 3, seed=1), tmp_path / "other")
        foreign = split_all(other, tmp_path / "foreign", 3)
        self.refuse(tmp_path, full, [*folders[:2], foreign[2]], "foreign/sub2: was trained from another base")

    def test_other_config(self, tmp_path, full, folders):
        text = (folders[1] / "config.json").read_text()
        (folders[1] / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
        self.refuse(tmp_path, full, folders, "sub1: config has rms_norm_eps = 1e-05, 1e-06 expected")

    def test_other_family(self, tmp_path, full, folders):
        shutil.rmtree(folders[2])
        save(tiny_model("mixtral", 1, num_experts_per_tok=1), folders[2])
        write_submodel_note(folders[2], base=identity(full), expert=2, experts=3, clustering="one")
        self.refuse(tmp_path, full, folders, "sub2: config has ")

    def test_other_clustering(self, tmp_path, full, folders):
        write_submodel_note(folders[2], base=identity(full), expert=2, experts=3, clustering="two")
        self.refuse(tmp_path, full, folders, "sub2: was trained on clustering 'two', .*sub0 on 'one'")

    def test_other_tokenizer(self, tmp_path, full, folders):
        (folders[1] / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        self.refuse(tmp_path, full, folders, "sub1: has another tokenizer than .*full")

    def test_other_number(self, tmp_path, full, folders):
        write_submodel_note(folders[2], base=identity(full), expert=2, experts=4, clustering="one")
        self.refuse(tmp_path, full, folders, "sub2: is one of 4 submodels, but 3 are to be merged")

    def test_same_twice(self, tmp_path, full, folders):
        self.refuse(tmp_path, full, [folders[0], folders[1], folders[0]], "sub0: is submodel 0, as is .*sub0")

    def test_too_few(self, tmp_path, full, folders):
        self.refuse(tmp_path, full, folders[:2], "2 submodels but the merged model has 3 experts", ConfigError)

    def test_other_dtype(self, tmp_path, full, folders):
        save(load(folders[0]).to(torch.bfloat16), folders[0])
        self.refuse(tmp_path, full, folders, "sub0: .* is BF16, F32 in .*full")

    def test_other_dtype_of_experts_only(self, tmp_path, full, folders):
        model = load(folders[1])
        for block in moe_blocks(model):
            block.experts.to(torch.bfloat16)
        save(model, folders[1])
        self.refuse(tmp_path, full, folders, "sub1: .*experts.* is BF16, F32 in .*sub0")

    def test_not_a_submodel(self, tmp_path, full, folders):
        (folders[0] / "submodel.json").unlink()
        self.refuse(tmp_path, full, folders, "sub0: has no submodel.json")

    @pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.1.mlp.experts.0.up_proj.weight"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, tmp_path, full, folders, value, key):
        stored = Checkpoint.open(folders[1]).tensors[key]
        values = stored.read()
        values[-1] = value
        stored.write(values)
        self.refuse(tmp_path, full, folders, f"sub1: {key} is not finite")

    def test_base_not_finite(self, tmp_path):
        model = tiny_model("qwen2_moe", 3)
        with torch.no_grad():
            model.model.norm.weight[3] = float("nan")
        full = save(model, tmp_path / "full")
        folders = split_all(full, tmp_path, 3)
        self.refuse(tmp_path, full, folders, "full: model.norm.weight is not finite")

    @pytest.mark.parametrize("weights", [[1, 2], [0, 0, 0], [1, -1, 2], [1, float("nan"), 1]])
    def test_weights(self, tmp_path, full, folders, weights):
        self.refuse(tmp_path, full, folders, "merge.backbone", ConfigError, weights=weights)

    def test_mixtral_cannot_do_without_renormalising(self, tmp_path):
        full = save(tiny_model("mixtral", 3), tmp_path / "full")
        self.refuse(
            tmp_path,
            full,
            split_all(full, tmp_path, 3),
            "mixtral always renormalises",
            ConfigError,
            renormalize=False,
        )
