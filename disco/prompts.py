"""Router rows from prompts, as mergekit-moe makes them: for comparison with rows that are fitted.

The prompts of an expert are documents of its cluster, each beginning with its begin token. A row is a direction of
length one, and the vectors come from the base model, which all experts were trained from:

- `hidden`: the residual stream that enters a layer, at a prompt's last token, averaged over prompts.
  (The router itself sees that stream after attention and a norm.)
- `cheap_embed`: the sum of the embeddings of all prompts' tokens, the same in every layer.

Shapes: K clusters, L layers, H hidden, V vocabulary, B rows, S positions of a row.
"""

import re
from pathlib import Path

import numpy as np
import torch

from disco.checkpoint import Checkpoint
from disco.config import ConfigError
from disco.engine import load_model
from disco.packing import Rows
from disco.tensor_files import FLOATS

METHODS = ("hidden", "cheap_embed")
BATCH = 8


def write_prompt_rows(
    merged: Path, base: Path, rows: list[Rows], cluster_E: np.ndarray, *, method: str, tokens: int
) -> None:
    """Replace the routers of the model in `merged`, in place. Experts of one cluster get its row, and beside it how
    their own rows differ from the cluster's mean; biases become 0.

    rows[k]: rows of cluster k, of which the first are the prompts, about `tokens` / K tokens of each.
    """
    checkpoint = Checkpoint.open(merged)
    weight_LKH = prompt_rows(base, rows, method, tokens)
    for key, stored in checkpoint.tensors.items():
        if checkpoint.family.role(key).kind != "router":
            continue
        if len(stored.shape) == 1:
            stored.write(torch.zeros(stored.shape, dtype=FLOATS[stored.dtype]))
            continue
        own_EH = stored.read().double().numpy()
        for cluster in range(len(rows)):
            own_EH[cluster_E == cluster] -= own_EH[cluster_E == cluster].mean(0)
        layer = int(re.search(r"layers\.(\d+)\.", key)[1])
        weight_EH = torch.from_numpy(weight_LKH[layer][cluster_E] + own_EH)
        stored.write(weight_EH.to(FLOATS[stored.dtype]))


@torch.no_grad()
def prompt_rows(base: Path, rows: list[Rows], method: str, tokens: int) -> np.ndarray:
    """Directions [L, K, H] of every layer, dense ones included, float64."""
    dtype = str(Checkpoint.open(base).config.dtype or torch.float32).removeprefix("torch.")
    model = load_model(base, dtype, "eager").eval().to("cuda" if torch.cuda.is_available() else "cpu")
    quota = -(-tokens // len(rows))
    made = []
    for cluster, part in enumerate(rows):
        if not part.total_labels:
            raise ConfigError(f"cluster {cluster} has no tokens for prompts: set merge.router=random")
        # Rows may repeat (several epochs); no two pieces start at the same token.
        distinct = np.sort(np.unique(part.start[part.pointer[:-1]], return_index=True)[1])
        enough = distinct[: np.searchsorted(np.cumsum(part.labels()[distinct]), quota) + 1]
        vector_LH = sum(
            (_embedded if method == "cheap_embed" else _hidden)(model, part, batch)
            for batch in np.array_split(enough, -(-len(enough) // BATCH))
        )
        made.append(vector_LH / vector_LH.norm(dim=1, keepdim=True).clamp_min(1e-30))
    weight_LKH = torch.stack(made, dim=1).cpu().numpy()
    if not np.isfinite(weight_LKH).all():
        raise ConfigError(f"{base}: its activations are not finite: set merge.router=random")
    return weight_LKH


def _embedded(model: torch.nn.Module, rows: Rows, chosen: np.ndarray) -> torch.Tensor:
    ids_BS = rows.batch(chosen)["input_ids"]
    kept_N = ids_BS[torch.from_numpy(rows.documents(chosen) >= 0)]
    table_VH = model.get_input_embeddings().weight
    count_V = torch.bincount(kept_N, minlength=len(table_VH)).double().to(table_VH.device)
    return (count_V @ table_VH.double()).expand(model.config.num_hidden_layers, -1)


def _hidden(model: torch.nn.Module, rows: Rows, chosen: np.ndarray) -> torch.Tensor:
    batch = rows.batch(chosen)
    positions_BS = batch["position_ids"]
    last_BS = torch.from_numpy(rows.documents(chosen) >= 0)
    last_BS[:, :-1] &= positions_BS[:, 1:] == 0  # the next piece begins
    out = model.base_model(
        input_ids=batch["input_ids"].to(model.device),
        position_ids=positions_BS.to(model.device),
        attention_mask=None,
        use_cache=False,
        output_hidden_states=True,
    )
    last_BS = last_BS.to(model.device)
    return torch.stack([entering_BSH[last_BS].double().sum(0) for entering_BSH in out.hidden_states[:-1]])
