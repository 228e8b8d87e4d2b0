"""Bytes of a training step's state as planned, against those that the engine of a stage holds."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from disco.config import Experiment
from disco.engine import make_engine, start_process_group
from disco.family import FAMILIES, set_trainable
from disco.loss import CausalLoss
from disco.plan import Memory
from disco.workload import Training, like
from disco.workloads import trainings
from tests.disco.tiny_experiment import tiny_experiment
from tests.disco.tiny_models import tiny_config

CASES = [(family, trainable) for family in sorted(FAMILIES) for trainable in ("all", "experts", "router")]


def job_of(folder: Path, family: str, trainable: str) -> Training:
    tiny_config(family, experts=4, vocab_size=304).save_pretrained(folder / family)
    raw = tiny_experiment(folder, seed_phase={"tokens": 0}) | {"model": {"source": str(folder / family)}}
    [job] = [job for job in trainings(Experiment.parse(raw)) if job.name == "finetune"]
    return like(job, trainable=trainable)


def hold(folder: Path) -> dict[tuple, tuple[int, int, int]]:
    """Bytes of parameters, gradients and optimizer state after an update, in a process of its own: DeepSpeed does
    not let go of its process group."""
    start_process_group()
    found = {}
    for family, trainable in CASES:
        job = job_of(folder, family, trainable)
        model = AutoModelForCausalLM.from_config(job.model, experts_implementation="eager").float()
        set_trainable(model, trainable)
        engine = make_engine(CausalLoss(model, chunk=64, aux=0.1), job.section)
        tokens = torch.arange(32).view(2, 16)
        positions = torch.arange(16).expand(2, -1)
        loss = engine(input_ids=tokens, labels=tokens, position_ids=positions, tokens=1.0).loss
        engine.backward(loss)
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        engine.step()
        state = sum(t.nbytes for states in engine.optimizer.state.values() for t in states.values())
        found[family, trainable] = (sum(p.nbytes for p in model.parameters()), gradients, state)
    return found


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(hold, (tmp_path_factory.mktemp("held"),))


@pytest.mark.parametrize("family, trainable", CASES)
def test_state_is_the_engines_to_the_byte(tmp_path, held, family, trainable):
    planned = Memory().estimate(job_of(tmp_path, family, trainable), devices=1, zero_stage=0, micro_batch=1)
    assert (planned.parameters, planned.gradients, planned.optimizer) == held[family, trainable]
