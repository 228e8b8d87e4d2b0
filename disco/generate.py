"""A continuation of a text by a model folder, and which experts served it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from disco.artifacts import ArtifactError
from disco.checkpoint import load_config, tokenizer_identity
from disco.engine import load_model
from disco.routing import RouterCounts


class Continuation(NamedTuple):
    """`counts_LE`: how often each layer chose each expert for the new tokens, int64 [MoE layers, experts]."""

    text: str
    tokens: int
    counts_LE: np.ndarray


@torch.no_grad()
def generate(folder: Path, text: str, *, tokens: int = 50, temperature: float = 0.0, seed: int = 0) -> Continuation:
    """Up to `tokens` more tokens after `text`: the likeliest ones, or drawn at a temperature above 0.

    Raises ArtifactError where the folder has no tokenizer or is no whole model, ValueError where there is
    nothing to continue or the model has no room for as many tokens.
    """
    config = load_config(folder)
    if tokenizer_identity(folder) is None:
        raise ArtifactError(f"{folder}: has no tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if not ids.numel():
        raise ValueError("the text is empty: give some words to continue")
    room = getattr(config, "max_position_embeddings", None)
    if tokens < 1 or (room and ids.shape[1] + tokens > room):
        raise ValueError(
            f"{tokens} tokens after {ids.shape[1]} of text do not fit the model's {room} positions: "
            "set --tokens to 1 or more, or shorten the text"
        )
    model = load_model(folder, str(config.dtype or torch.float32).removeprefix("torch."), "eager").eval()
    drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    mask = torch.ones_like(ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=pad, **drawn)
    new = whole.shape[1] - ids.shape[1]
    with RouterCounts(model, 1) as routers:
        model(whole[:, :-1], use_cache=False)  # what chose each new token; the last one chose nothing
        clusters_N = np.full(whole.shape[1] - 1, -1)
        clusters_N[-new:] = 0
        routers.add(clusters_N)
    continued = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    return Continuation(continued, new, routers.counts_LKE[:, 0])
