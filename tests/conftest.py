"""Tiny models and rows that several tests share."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.disco.tiny_models import tiny_config

torch.set_num_threads(1)


@pytest.fixture
def tiny_model():
    """tiny_model(model_type="qwen2_moe", **config) -> a small, seeded Hugging Face model."""

    def make(model_type: str = "qwen2_moe", **changed):
        torch.manual_seed(0)
        config = tiny_config(model_type, experts=4, vocab_size=96, initializer_range=0.1, **changed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                torch.nn.init.normal_(parameter, std=0.3)
        return model

    return make


@pytest.fixture
def toy_rows(tmp_path):
    """toy_rows(count, length) -> packed rows of random documents, saved beside their token file."""
    from disco.artifacts import file_hash
    from disco.packing import Rows

    def make(count: int = 12, length: int = 16, vocab: int = 96, seed: int = 0) -> Rows:
        generator = np.random.default_rng(seed)
        path = tmp_path / f"toy-{seed}-{count}-{length}.tokens"
        tokens, starts, lengths, pointer = [], [], [], [0]
        for _ in range(count):
            free = length
            while free > 1:
                used = int(generator.integers(1, free + 1))
                starts.append(sum(map(len, tokens)))
                tokens.append(generator.integers(0, vocab, used + 1).astype(np.uint16))
                lengths.append(used)
                free -= used + int(generator.integers(0, 2))
            pointer.append(len(starts))
        np.concatenate(tokens).tofile(path)
        return Rows(
            tokens_path=path,
            tokens_sha256=file_hash(path),
            dtype=np.dtype(np.uint16),
            sequence_length=length,
            pad=0,
            pointer=np.array(pointer),
            start=np.array(starts),
            length=np.array(lengths),
            document=np.arange(len(starts)),
        )

    return make
