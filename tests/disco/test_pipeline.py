"""The whole pipeline on a tiny corpus: end to end, stale stages, damage, kills, packs."""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from disco import artifacts, hindsight, pack, pipeline
from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint
from disco.cluster import assignments
from disco.config import ConfigError, Experiment
from disco.corpus import Corpus
from disco.family import num_experts
from disco.stages import stages
from disco.train import curve_points, joint_rows, mixed_rows, submodel_rows
from launch.ledger import read
from tests.disco.tiny_experiment import corpus, tiny_experiment, write


def model_hashes(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*.safetensors"))
        if ".partial" not in str(path)
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Experiment:
    """A run with all stages and both baselines, made once."""
    folder = tmp_path_factory.mktemp("finished")
    corpus(folder / "corpus")
    config = Experiment.load(write(folder, baselines=["joint", "random_split"]))
    pipeline.run(config, say=lambda text: None)
    return config


def test_every_stage_is_fresh_and_nothing_runs_twice(finished):
    assert set(pipeline.status(finished).values()) == {pipeline.FRESH}
    before = {name: artifacts.manifest(finished.folder / name)["finished"] for name in stages(finished)}
    said = []
    pipeline.run(finished, say=said.append)
    assert said == [f"{name}: fresh" for name in stages(finished)]
    assert before == {name: artifacts.manifest(finished.folder / name)["finished"] for name in stages(finished)}


@pytest.mark.parametrize("stage", ["initial", "start", "train/0", "merge", "finetune", "baselines/joint"])
def test_model_folders_open_in_plain_transformers(finished, stage):
    folder = finished.folder / stage
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the whale and the court", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert model.config.vocab_size >= len(tokenizer)


def test_joint_training_sees_exactly_the_tokens_of_disco(finished):
    rows = read(finished.folder / "metrics.jsonl")
    last = {row["phase"]: row["tokens"] for row in rows}
    parts = ["start", "train/0", "train/1", "finetune_router", "finetune"]
    assert last["baselines/joint"] == sum(last[part] for part in parts)
    data = Corpus.open(finished.folder / "prepare")
    labels = assignments(finished.folder / "cluster", "train")
    tune, seed = finished.finetune, finished.seed_phase
    seen = [submodel_rows(finished, data, labels, k) for k in range(2)]
    seen += [
        mixed_rows(finished, data, seed, seed.tokens, 1),
        mixed_rows(finished, data, tune, tune.router_tokens, 2),
    ]
    seen += [mixed_rows(finished, data, tune, tune.tokens, 3)]
    joint = joint_rows(finished, data, labels, 2)

    def pieces(parts):
        return sorted((int(a), int(b)) for part in parts for a, b in zip(part.start, part.length, strict=True))

    assert pieces([joint]) == pieces(seen)


def test_the_ledger_bills_every_training_at_its_price(finished):
    rows = read(finished.folder / "ledger.jsonl")
    phases = {row["phase"] for row in rows}
    trained = {name for name, stage in stages(finished).items() if stage.trains}
    assert phases == set(stages(finished))  # those that train nothing too
    others = [row for row in rows if row["phase"] not in trained]
    for row in others:
        assert row["trains"] is False and row["price_per_hour"] == 0.085 and row["kind"] == "measured"
    rows = [row for row in rows if row["phase"] in trained]
    phases &= trained
    for row in rows:
        expected = 2.28 if "finetune" in row["phase"] or "joint" in row["phase"] else 0.35
        assert row["price_per_hour"] == expected
        assert row["dollars"] == pytest.approx(row["seconds"] * row["devices"] * expected / 3600)
        assert row["kind"] == "simulated"
    tokens = {phase: sum(row["tokens"] for row in rows if row["phase"] == phase) for phase in phases}
    metrics = {row["phase"]: row["tokens"] for row in read(finished.folder / "metrics.jsonl")}
    assert tokens == metrics


def test_a_plan_beside_the_run_agrees_to_the_last_operation(finished):
    found = {row.name: row for row in hindsight.compare(finished, finished.folder)}
    assert set(found) == {name for name, stage in stages(finished).items() if stage.trains}
    for row in found.values():
        assert (row.predicted.tokens, row.predicted.flops) == (row.measured.tokens, row.measured.flops)
        assert row.device == "cpu" and row.predicted.seconds > 0 and row.measured.seconds > 0
        assert (
            0 < row.predicted.peak_memory_bytes < row.measured.peak_memory_bytes
        )  # a process is more than tensors
    console = Console(width=200, record=True, file=io.StringIO())
    hindsight.show([*found.values()], console)
    assert "baselines/random_split/train/1" in console.export_text()
    with pytest.raises(ArtifactError, match="its ledger is empty or missing"):
        hindsight.compare(finished, finished.folder / "prepare")


def test_clusters_partition_the_corpus_and_find_the_domains(finished):
    data = Corpus.open(finished.folder / "prepare").split("train")
    labels = assignments(finished.folder / "cluster", "train")
    assert len(labels) == len(data)
    agreement = np.mean(labels == data.source)
    assert max(agreement, 1 - agreement) > 0.9


def test_curve_points_end_at_the_last_step(finished):
    rows = mixed_rows(finished, Corpus.open(finished.folder / "prepare"), finished.finetune, 1024, 3)
    assert curve_points(finished, rows, finished.finetune) == [4, 8]


def test_a_changed_section_makes_only_what_depends_on_it_stale(finished):
    changed = finished.model_copy(update={"merge": finished.merge.model_copy(update={"backbone": "uniform"})})
    states = pipeline.status(changed)
    assert states["train/1"] == pipeline.FRESH
    assert states["merge"] == pipeline.STALE
    assert states["finetune"] == pipeline.WAITING
    assert states["baselines/joint"] == pipeline.FRESH
    quiet = finished.model_copy(update={"train": finished.train.model_copy(update={"log_every": 3})})
    assert set(pipeline.status(quiet).values()) == {pipeline.FRESH}


def test_an_edited_source_file_makes_the_corpus_stale(finished, tmp_path):
    source = Path(finished.corpus.sources[0].jsonl[0])
    before = source.read_bytes()
    try:
        source.write_bytes(before + b'{"text": "one more document about the whale and the storm"}\n')
        assert pipeline.status(finished)["prepare"] == pipeline.STALE
    finally:
        source.write_bytes(before)
    assert pipeline.status(finished)["prepare"] == pipeline.FRESH


def test_damage_is_named_and_rebuilt_only_when_asked(finished):
    path = finished.folder / "merge" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: .* expected: rebuild it with --force merge"):
        pipeline.run(finished, until="merge", say=lambda text: None)
    assert path.stat().st_size == len(whole) - 100
    pipeline.run(finished, until="merge", force=["merge"], say=lambda text: None)
    assert path.read_bytes() == whole
    assert set(pipeline.status(finished).values()) == {pipeline.FRESH}


def test_what_an_earlier_form_of_the_experiment_left_is_not_reported(finished, tmp_path):
    """Without fine-tuning and baselines the merged model is the final one, and nothing else is on the bill."""
    home = finished.model_copy(update={"runs": str(tmp_path / "home")})
    shutil.copytree(finished.folder, home.folder)
    untuned = home.finetune.model_copy(update={"tokens": 0, "router_tokens": 0})
    less = home.model_copy(update={"finetune": untuned, "baselines": []})
    pipeline.run(less, say=lambda text: None)
    results = artifacts.read_json(less.folder / "evaluate" / "results.json")
    assert list(results["models"]) == ["start", "submodel 0", "submodel 1", "merged"]
    page = (less.folder / "report" / "report.md").read_text()
    assert "joint training of the same model" not in page
    assert "fine-tuning |" not in page


def test_status_tells_damage_of_one_stage_from_the_rest(finished, tmp_path):
    home = finished.model_copy(update={"runs": str(tmp_path / "home")})
    shutil.copytree(finished.folder, home.folder)
    (home.folder / "merge" / "manifest.json").write_text('{"files": []}')
    states = pipeline.status(home)
    assert states["merge"] == pipeline.DAMAGED
    assert states["train/0"] == pipeline.FRESH
    with pytest.raises(ArtifactError, match="rebuild the stage with --force"):
        pipeline.run(home, say=lambda text: None)


def test_unknown_stages_are_refused(finished):
    with pytest.raises(ConfigError, match="no stage is called 'finetun': did you mean 'finetune'"):
        pipeline.run(finished, until="finetun")


def test_a_second_run_of_the_same_folder_is_refused(finished):
    with artifacts.lock(finished.folder), pytest.raises(ArtifactError, match="another disco process"):
        pipeline.run(finished)


def test_the_report_names_both_costs(finished):
    page = (finished.folder / "report" / "report.html").read_text()
    assert "simulated" in page
    assert "joint" in page
    assert (finished.folder / "report" / "report.md").exists()


@pytest.mark.parametrize(
    "what, name, stage",
    [
        (1, "tiny-submodel-1", "train/1"),
        pytest.param("finetune_router", "tiny-finetune_router", "finetune_router", marks=pytest.mark.slow),
        ("finetune", "tiny-finetune", "finetune"),
        pytest.param("baselines/joint", "tiny-baselines-joint", "baselines/joint", marks=pytest.mark.slow),
    ],
)
def test_what_is_packed_trains_elsewhere_to_the_same_weights(finished, tmp_path, what, name, stage):
    """Pack, unpack in another folder, train there with the command line, collect: the very same checkpoint."""
    archive = pack.pack(finished, what, tmp_path)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    away, option = tmp_path / name, "--submodel" if isinstance(what, int) else "--stage"
    command = [sys.executable, "-m", "disco.cli", "train", "experiment.yaml"]
    wrong = subprocess.run([*command, "--submodel", "0"], cwd=away, capture_output=True, text=True)
    assert wrong.returncode == 2 and f"disco train ... {option} {what}" in wrong.stderr
    done = subprocess.run([*command, option, str(what)], cwd=away, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = away / f"{name}.result.tar"
    home = finished.model_copy(update={"runs": str(tmp_path / "home")})
    shutil.copytree(finished.folder, home.folder)
    reference = model_hashes(home.folder)
    assert pack.collect(home, result) == f"{stage}: there already, the same to the last byte"
    shutil.rmtree(home.folder / stage)
    bill = len(read(home.folder / "ledger.jsonl"))
    assert pack.collect(home, result) == f"{stage}: taken from {result}"
    assert model_hashes(home.folder) == reference
    assert set(pipeline.status(home).values()) == {pipeline.FRESH}
    assert len(read(home.folder / "ledger.jsonl")) > bill
    section = "train" if isinstance(what, int) else "finetune"
    changed = {section: getattr(home, section).model_copy(update={"learning_rate": 1e-3})}
    shutil.rmtree(home.folder / stage)
    with pytest.raises(ArtifactError, match="another configuration or seed"):
        pack.collect(home.model_copy(update=changed), result)


def test_what_cannot_be_packed_is_refused(finished, tmp_path):
    with pytest.raises(ConfigError, match="--stage finetun: no such stage .*: did you mean 'finetune'"):
        pack.pack(finished, "finetun", tmp_path)
    with pytest.raises(ConfigError, match="--submodel 7: this experiment has submodels 0 to 1"):
        pack.pack(finished, 7, tmp_path)


@pytest.mark.parametrize("what", ["missing", "garbage", "escape", "link", "hard link", "not a result", "edited"])
def test_bad_results_are_refused(finished, tmp_path, what):
    result = tmp_path / "bad.tar"
    if what == "garbage":
        result.write_bytes(os.urandom(2000))
    elif what != "missing":
        with tarfile.open(result, "w") as tar:
            if what == "escape":
                info = tarfile.TarInfo("../../escaped")
                info.size = 4
                tar.addfile(info, io.BytesIO(b"evil"))
            elif "link" in what:
                info = tarfile.TarInfo("root/submodel")
                info.type = tarfile.SYMTYPE if what == "link" else tarfile.LNKTYPE
                info.linkname = "../../../../outside"
                tar.addfile(info)
            elif what == "not a result":
                tar.add(finished.folder / "cluster", arcname="cluster")
            else:
                shutil.copytree(finished.folder / "train" / "0", tmp_path / "work" / "submodel")
                weights = tmp_path / "work" / "submodel" / "model.safetensors"
                weights.write_bytes(weights.read_bytes()[:-1] + b"x")
                tar.add(tmp_path / "work", arcname="work")
    with pytest.raises(ArtifactError, match=r"bad\.tar|model\.safetensors"):
        pack.collect(finished, result)
    assert not (finished.folder / "collect.partial").exists()
    assert not (finished.folder.parent / "escaped").exists()


def test_kills_at_any_moment_change_no_bit(finished, tmp_path):
    """SIGKILL the whole run several times, then let it finish: the same weights, and nothing done twice."""
    folder = tmp_path
    shutil.copytree(Path(finished.corpus.sources[0].jsonl[0]).parent, folder / "corpus")
    path = write(folder)
    config = Experiment.load(path)
    command = [sys.executable, "-m", "disco.cli", "run", str(path)]
    draw = random.Random(3)
    kept: dict[str, float] = {}
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=draw.uniform(4, 14))
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.2)
        for manifest in config.folder.rglob("manifest.json"):
            if ".partial" not in str(manifest):
                name = str(manifest.parent)
                stamp = json.loads(manifest.read_text())["finished"]
                assert kept.setdefault(name, stamp) == stamp, f"{name} was made twice"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    got, expected = model_hashes(config.folder), model_hashes(finished.folder)
    assert got
    assert got == {name: value for name, value in expected.items() if name in got}
    assert {"train/0/model.safetensors", "finetune/model.safetensors"} <= got.keys()


def test_a_checkpoint_is_split_trained_and_merged_again(finished, tmp_path):
    """From a finished MoE, with its own tokenizer and router: experts change, frozen parts and router do not."""
    raw = tiny_experiment(tmp_path, name="again", runs=str(tmp_path / "runs"))
    raw["model"] = {"source": str(finished.folder / "finetune")}
    raw["corpus"] = finished.corpus.model_dump(mode="json", exclude_none=True) | {"tokenizer": {"kind": "model"}}
    raw["seed_phase"], raw["finetune"] = {"tokens": 0}, {"tokens": 0}
    raw["train"] |= {"tokens": 512, "mode": "expert"}
    raw["merge"] = {"router": "original"}
    config = Experiment.parse(raw)
    pipeline.run(config, say=lambda text: None)
    source = load_file(finished.folder / "finetune" / "model.safetensors")
    merged = load_file(config.folder / "merge" / "model.safetensors")
    assert source.keys() == merged.keys()
    for name in source:
        assert torch.equal(source[name], merged[name]) == (".experts." not in name), name


@pytest.mark.slow
def test_submodels_and_tuning_by_blocks(tmp_path):
    """Trained, carried away and back, merged, tuned; the report says by what."""
    corpus(tmp_path / "corpus")
    changed = {
        "seed_phase": {"tokens": 0},
        "train": {"mode": "bcd", "tokens": 2048},
        "bcd": {"order": "descending"},
    }
    changed["finetune"] = {"optimizer": "bcd", "router_tokens": 128}
    config = Experiment.load(write(tmp_path, **changed))
    pipeline.run(config, until="cluster", say=lambda text: None)
    pipeline.run(config, until="split/1", say=lambda text: None)
    with tarfile.open(pack.pack(config, 1, tmp_path)) as tar:
        tar.extractall(tmp_path, filter="data")
    away = tmp_path / "tiny-submodel-1"
    command = [sys.executable, "-m", "disco.cli", "train", "experiment.yaml", "--submodel", "1"]
    subprocess.run(command, cwd=away, check=True)
    assert "taken from" in pack.collect(config, away / "tiny-submodel-1.result.tar")
    pipeline.run(config, say=lambda text: None)
    for row in hindsight.compare(config, config.folder):
        assert (row.predicted.tokens, row.predicted.flops) == (row.measured.tokens, row.measured.flops), row.name
    assert set(pipeline.status(config).values()) == {pipeline.FRESH}
    begin, end = (load_file(config.folder / name / "model.safetensors") for name in ("split/1", "train/1"))
    assert not any(torch.equal(begin[name], end[name]) for name in begin)
    said = (config.folder / "report" / "report.md").read_text()
    assert "block coordinate descent: submodels, fine-tuning (bcd: order descending, 1 at a time" in said
    changed = config.model_copy(update={"bcd": config.bcd.model_copy(update={"order": "shuffled"})})
    states = pipeline.status(changed)
    assert states["train/0"] == pipeline.STALE and states["cluster"] == pipeline.FRESH


@pytest.mark.slow
def test_a_plan_beside_a_run_by_blocks_with_expansion_agrees(tmp_path):
    """Micro-batches of one row too, and joint training, whose rows are all those of the others."""
    corpus(tmp_path / "corpus")
    changed = {
        "seed_phase": {"tokens": 0},
        "train": {"mode": "bcd", "micro_batch_size": 2},
        "bcd": {"order": "ends", "expansion": {}, "steps_per_block": 1},
        "finetune": {"optimizer": "bcd", "router_tokens": 0, "tokens": 2048, "micro_batch_size": 1},
        "baselines": ["joint"],
    }
    config = Experiment.load(write(tmp_path, **changed))
    pipeline.run(config, until=["finetune", "baselines/joint"], say=lambda text: None)
    found = hindsight.compare(config, config.folder)
    assert [row.name for row in found] == ["train/0", "train/1", "finetune", "baselines/joint"]
    for row in found:
        assert (row.predicted.tokens, row.predicted.flops) == (row.measured.tokens, row.measured.flops), row.name


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"train": {"mode": "bcd"}, "bcd": {"always_on": ["*nrm*"]}},
            r"^bcd: always_on pattern '\*nrm\*' matches no",
        ),
        (
            {"train": {"mode": "bcd"}, "bcd": {"steps_per_block": 3}},
            r"train \(a submodel\) makes 16 updates but one cycle over 6 blocks takes 18 .*steps_per_block=2",
        ),
        ({"finetune": {"optimizer": "bcd", "tokens": 512}}, "finetune makes 4 updates.*active_blocks=2"),
        ({"seed_phase": {"optimizer": "bcd"}, "bcd": {"active_blocks": 9}}, "active_blocks is 9 but there are 6"),
        (
            {"joint": {"optimizer": "bcd"}, "bcd": {"granularity": ["lm_head"]}, "baselines": ["joint"]},
            "bcd: no pattern covers parameter",
        ),
        ({"cluster": {"k": 3}}, "cluster.k is 3 but the model has 2 experts"),
        ({"train": {"zero_stage": 3, "mode": "expert"}}, "train.zero_stage is 3.*set train.zero_stage=2"),
        ({"finetune": {"zero_stage": 3}}, "finetune.zero_stage is 3.*router_tokens"),
        ({"hardware": {"train": "rtx4909"}}, "hardware.train.*rtx4090"),
        ({"hardware": {"finetune": "a800"}}, "hardware.finetune: no price of 'a800' is known: write"),
        ({"merge": {"router": "original"}}, "merge.router is 'original'"),
        ({"merge": {"backbone": [1.0, 2.0, 3.0]}}, "merge.backbone is .*needs 2 weights"),
        ({"merge": {"backbone": [0.0, 0.0]}}, "of positive sum"),
        ({"corpus": {"sequence_length": 128}}, "corpus.sequence_length is 128.*max_position_embeddings is 64"),
        ({"train": {"processes": 1000, "batch_size": 1000}}, "train.processes is 1000 but this machine has"),
        ({"cluster": {"features": "embedding"}, "seed_phase": {"tokens": 0}}, "the model is untrained"),
        ({"corpus": {"sources": [{"name": "gone", "jsonl": ["nowhere/*.jsonl"]}]}}, "gone.*nowhere"),
        ({"model": {"config": {"model_type": "llama"}}}, "llama"),
        ({"model": {"config": {"model_type": ["x"]}}}, "model_type is"),
        ({"corpus": {"tokenizer": {"kind": "train", "vocab_size": 10}}}, "vocab_size"),
        ({"model": {"config": {"model_type": "qwen2_moe", "hiden_size": 8}}}, "did you mean 'hidden_size'"),
        ({"model": {"source": "no/such/folder/at/all", "config": None}}, "no such folder"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(tmp_path, changed, match):
    corpus(tmp_path / "corpus")
    config = Experiment.load(write(tmp_path, **changed))
    with pytest.raises(ConfigError, match=match):
        pipeline.run(config)
    assert not (config.folder / "prepare").exists()


def test_a_cluster_smaller_than_a_batch_is_refused(tmp_path):
    corpus(tmp_path / "corpus", documents=12)
    config = Experiment.load(write(tmp_path, train={"batch_size": 64}))
    with pytest.raises(ConfigError, match="train.batch_size"):
        pipeline.run(config, until="cluster")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_no_training_process_outlives_a_killed_run(tmp_path):
    """With two processes a submodel too, where torchrun's agent stands between."""
    corpus(tmp_path / "corpus")
    path = write(tmp_path, seed_phase={"tokens": 10_000_000, "processes": 2, "log_every": 1})
    process = subprocess.Popen([sys.executable, "-m", "disco.cli", "run", str(path)], stdout=subprocess.DEVNULL)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    deadline = time.time() + 240
    while not metrics.exists() and time.time() < deadline:
        time.sleep(0.1)
    assert len(training_processes(tmp_path)) >= 3  # the agent and its two
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.time() + 30
    while training_processes(tmp_path) and time.time() < deadline:
        time.sleep(0.1)
    assert not training_processes(tmp_path)


def training_processes(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "disco.job" in command and str(folder) in command:
                found.append(command)
    return found


@pytest.mark.parametrize("seeded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["groups", "clones"])
def test_fewer_clusters_than_experts(tmp_path, seeded):
    corpus(tmp_path / "corpus")
    raw = tiny_experiment(tmp_path, cluster={"k": 2}, finetune={"tokens": 0, "router_tokens": 0})
    raw["model"]["config"]["num_experts"] = 5
    if not seeded:
        raw["seed_phase"]["tokens"] = 0
    experiment = Experiment.parse(raw)
    pipeline.run(experiment, until="evaluate", say=lambda text: None)
    run = experiment.folder
    sizes = [num_experts(Checkpoint.open(run / "train" / str(submodel)).config) for submodel in range(2)]
    assert sizes == ([1, 1] if seeded else [3, 2])
    merged = Checkpoint.open(run / "merge").config
    assert num_experts(merged) == 5 and merged.norm_topk_prob
    assert artifacts.read_json(run / "merge" / "merge.json")["groups"] == [3, 2]
    counts = artifacts.read_json(run / "evaluate" / "results.json")["routing"]["merged"]["counts"]
    assert [len(counts[0]), len(counts[0][0])] == [2, 5]


def half_trained(finished: Experiment, runs: Path, **before) -> tuple[Experiment, Path]:
    """A copy of the run whose fine-tuning was begun with `before` in its section; its partial folder."""
    home = finished.model_copy(update={"runs": str(runs)})
    shutil.copytree(finished.folder, home.folder)
    partial = home.folder / "finetune.partial"
    (home.folder / "finetune").rename(partial)
    (partial / "manifest.json").unlink()
    (partial / "work" / "checkpoints" / "step-00000004").mkdir(parents=True)
    stage = stages(home)["finetune"]
    artifacts.write_json(partial / "work" / "job.json", {"section": stage.section | before})
    key = artifacts.stage_key(pipeline.expected_inputs(home, stage), stage.section | before, home.seed)
    artifacts.remake_from(partial, key)
    return home, partial


def test_a_checkpoint_of_other_processes_is_kept_and_refused(finished, tmp_path):
    home, partial = half_trained(finished, tmp_path / "home", processes=4, micro_batch_size=1)
    with pytest.raises(ArtifactError, match=r"checkpoint of 4 processes, .* is 1: .*--force finetune"):
        pipeline.run(home, until="finetune", say=lambda text: None)
    assert (partial / "work" / "checkpoints" / "step-00000004").exists()


@pytest.mark.parametrize("before", [{"processes": 4, "batch_size": 8}, {"processes": 1, "learning_rate": 1.0}])
def test_what_was_half_trained_from_something_else_begins_anew(finished, tmp_path, before):
    home, partial = half_trained(finished, tmp_path / "home", micro_batch_size=1, **before)
    pipeline._suit_processes(home, stages(home)["finetune"], say=pytest.fail)
    assert not artifacts.made_from(partial, artifacts.stage_key({}, {}, 0))


@pytest.mark.slow
def test_tuning_goes_on_with_another_number_of_processes(tmp_path):
    """Killed with two processes, ended by one: what two would have made, to rounding."""
    corpus(tmp_path / "corpus")
    tune = {"tokens": 12800, "router_tokens": 0, "processes": 2, "zero_stage": 2, "checkpoint_every": 2}
    path = write(tmp_path, seed_phase={"tokens": 0}, finetune=tune)
    config = Experiment.load(path)
    pipeline.run(config, until="merge", say=lambda text: None)
    shutil.copytree(config.folder, tmp_path / "runs" / "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "disco.cli", "finetune", str(path)], stdout=subprocess.DEVNULL
    )
    checkpoints = config.folder / "finetune.partial" / "work" / "checkpoints"
    while not [*checkpoints.glob("step-*[0-9]")]:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    said = []
    pipeline.run(Experiment.load(path, ["finetune.processes=1"]), until="finetune", say=said.append)
    assert "finetune: goes on with 1 processes from a checkpoint of 2" in said
    rows = [row for row in read(config.folder / "ledger.jsonl") if row["phase"] == "finetune"]
    again = [row for row in rows if row["attempt"] == 2]
    assert again[0]["status"] == "startup" and again[0]["step"] > 0 and {row["devices"] for row in again} == {1}
    pipeline.run(config.model_copy(update={"name": "whole"}), until="finetune", say=lambda text: None)
    got, expected = (load_file(tmp_path / "runs" / run / "finetune/model.safetensors") for run in ("tiny", "whole"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-4)
