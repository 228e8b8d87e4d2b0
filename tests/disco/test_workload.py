"""What a stage trains when: operations of blocks against the formula applied update by update."""

import numpy as np

from disco.config import Experiment
from disco.operations import step_flops
from disco.workload import like
from disco.workloads import trainings
from launch.flops import training_flops
from tests.disco.tiny_experiment import tiny_experiment


def test_the_expansion_is_counted_in_the_last_micro_batch_of_each_update(tmp_path):
    raw = tiny_experiment(tmp_path, seed_phase={"tokens": 0}, train={"tokens": 1024, "micro_batch_size": 1})
    job = trainings(Experiment.parse(raw))[0]
    each = np.random.default_rng(0).integers(1, 32, job.rows)
    blocks = {"order": "ends", "expansion": {}, "steps_per_block": 1}
    found = like(job, method="bcd", blocks=blocks, row_labels=each, labels=int(each.sum()))
    total, size = 0, job.section.batch_size
    for update, (count, names, above, _) in enumerate(found.turns):
        assert count == 1
        for place, labels in enumerate(each[update * size : (update + 1) * size]):
            trained = names | above if place == size - 1 else names
            total += training_flops(job.model, 32, labels=int(labels), trainable=trained)
    assert found.flops == total
    assert any(above for *_, above, _ in found.turns)


def test_stages_that_only_their_labels_tell_apart_are_not_alike(tmp_path):
    job = trainings(Experiment.parse(tiny_experiment(tmp_path)))[0]
    one, other = (like(job, row_labels=np.roll(np.arange(job.rows), shift)) for shift in (0, 1))
    assert one.alike != other.alike and like(one, name="train/9").alike == one.alike


def test_a_row_is_its_positions_and_its_labels(tmp_path):
    job = trainings(Experiment.parse(tiny_experiment(tmp_path)))[0]
    names = frozenset(name for name, _ in job.shapes.named_parameters())
    per_row, per_label = step_flops(job.model, 32, job.section, names)
    assert per_row + 7 * per_label == training_flops(job.model, 32, labels=7)
