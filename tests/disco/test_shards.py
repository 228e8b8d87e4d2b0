"""Features in parts: joined they give the clusters that one machine gives; parts of something else are refused."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disco import pipeline, stages
from disco.artifacts import ArtifactError
from disco.cli import main
from disco.config import ConfigError, Experiment
from disco.shards import parse_part
from tests.disco.tiny_experiment import corpus, write


def quiet(text):
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was clustered in one go."""
    folder = tmp_path_factory.mktemp("whole")
    corpus(folder / "corpus")
    config = Experiment.load(write(folder))
    pipeline.run(config, until="cluster", say=quiet)
    return config


@pytest.fixture
def run(whole, tmp_path):
    """The same run before its clustering."""
    shutil.copytree(whole.folder, tmp_path / "tiny")
    shutil.rmtree(tmp_path / "tiny" / "cluster")
    return whole.model_copy(update={"runs": str(tmp_path)})


def test_parts_are_all_documents_once_and_give_the_same_clusters(whole, run):
    paths = [stages.write_feature_part(run, f"{part}/3", quiet) for part in (3, 1, 2)]
    numbers = np.sort(np.concatenate([pq.read_table(path)["document"].to_numpy() for path in paths]))
    assert (numbers == np.arange(len(pq.read_table(run.folder / "prepare" / "train.parquet")))).all()
    pipeline.run(run, until="cluster", say=quiet)
    for name in ("train.parquet", "validation.parquet", "centroids.npy"):
        assert (run.folder / "cluster" / name).read_bytes() == (whole.folder / "cluster" / name).read_bytes()


def test_what_is_joined_is_what_the_parts_hold(run):
    """The clusters come from the parts: other numbers there, other clusters."""
    path = stages.write_feature_part(run, "1/1", quiet)
    table = pq.read_table(path)
    x = np.random.default_rng(0).normal(size=(len(table), table.schema.field("features").type.list_size))
    other = pa.FixedSizeListArray.from_arrays(pa.array(x.astype(np.float32).ravel()), x.shape[1])
    pq.write_table(table.set_column(1, table.schema.field("features"), other), path)
    pipeline.run(run, until="cluster", say=quiet)
    labels = pq.read_table(run.folder / "cluster" / "train.parquet")["cluster"].to_numpy()
    sources = pq.read_table(run.folder / "prepare" / "train.parquet")["source"].to_pylist()
    agree = np.mean(labels == (np.array(sources) == "sea"))
    assert 0.25 < agree < 0.75


def test_missing_damaged_and_foreign_parts(run):
    paths = [stages.write_feature_part(run, f"{part}/2", quiet) for part in (1, 2)]
    kept = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(ArtifactError, match=r"1 of 2 parts are there, .*00002.* is missing: run .* --shard 2/2"):
        pipeline.run(run, until="cluster", say=quiet)
    paths[1].write_bytes(kept[:-9])
    with pytest.raises(ArtifactError, match="part-00002-of-00002.parquet: damaged"):
        pipeline.run(run, until="cluster", say=quiet)
    os.replace(paths[0], paths[1])
    shutil.copy(paths[1], paths[0])
    with pytest.raises(ArtifactError, match="00002.parquet: holds other documents than part 2 of 2"):
        pipeline.run(run, until="cluster", say=quiet)
    # Of other settings: they do not count, and the stage makes its own.
    other = run.model_copy(update={"cluster": run.cluster.model_copy(update={"dimensions": 4})})
    pipeline.run(other, until="cluster", say=quiet)


def test_other_vectorizers_are_refused(run, monkeypatch):
    stages.write_feature_part(run, "1/1", quiet)
    monkeypatch.setattr("disco.shards.CLOSE", -1.0)
    with pytest.raises(ArtifactError, match="was made with another vectorizer"):
        pipeline.run(run, until="cluster", say=quiet)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/0", "a/b"])
def test_bad_parts(text):
    with pytest.raises(ConfigError, match=f"--shard is '{text}'"):
        parse_part(text)


def test_the_command(run, monkeypatch, capsys):
    (run.folder / "experiment.yaml").write_text(run.dump())
    monkeypatch.setattr("sys.argv", ["disco", "cluster", str(run.folder), "--shard", "2/2"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "part-00002-of-00002.parquet" in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(ConfigError, match="use fewer parts"):
        stages.write_feature_part(run, "1/9999", quiet)
