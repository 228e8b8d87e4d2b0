"""Section `model` of the experiment file: where the full MoE comes from."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from disco.schema import Positive, Section, Share, Tokens


class Upcycle(Section):
    """A dense model to a Mixture-of-Experts of the class that is the same otherwise (Llama and Mistral to Mixtral,
    Qwen2 to Qwen2Moe, Qwen3 to Qwen3Moe, OLMo 2 to FlexOlmo)."""

    experts: Annotated[int, Field(ge=2)]
    top_k: Positive = 2
    method: Literal["copy", "drop", "split"] = Field(
        "copy",
        description="an expert is the whole feed-forward part; that with a share of its neurons drawn anew; or an "
        "equal part of it",
    )
    drop: Share | None = Field(None, description="share of the neurons that method drop draws anew; 0.5 if absent")
    noise: Annotated[float, Field(ge=0)] = Field(
        0.0, description="standard deviation of noise on each expert's weights, as a share of the matrix's own"
    )

    @model_validator(mode="after")
    def _fit(self):
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k} but there are {self.experts} experts: set it to 1..{self.experts}"
            )
        if self.drop is not None and self.method != "drop":
            raise ValueError(f"drop is for method drop, not {self.method}: leave it out or set method: drop")
        return self


class Extend(Section):
    """Experts added to the trained MoE in `source`, one a cluster of a new domain's corpus. The shared part is
    frozen; old experts and their router rows keep their bits until fine-tuning, if there is any."""

    experts: Positive = Field(1, description="new experts, and clusters of the corpus")
    begin: Tokens | None = Field(
        None, description="old expert that new ones begin from; absent = the one chosen most for their text"
    )
    old_text: list[str] = Field(
        [],
        description="globs of text files that the old experts serve, which the new router rows have to leave to "
        "them; absent = text that the old model draws",
    )


class Model(Section):
    """Where the full MoE comes from: `source` (a folder or hub name), or `config` (from scratch)."""

    source: str | None = None
    revision: str | None = None
    config: dict[str, Any] | None = Field(None, description="Hugging Face config with model_type")
    upcycle: Upcycle | None = Field(None, description="source or config is a dense model, to be given experts")
    extend: Extend | None = Field(None, description="add experts to source")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    experts: Literal["grouped_mm", "batched_mm", "eager"] = Field(
        "grouped_mm", description="Hugging Face's implementation of the expert layer"
    )

    @model_validator(mode="after")
    def _one_start(self):
        if (self.source is None) == (self.config is None):
            raise ValueError(
                "give exactly one of model.source (a folder or hub name) and model.config (from scratch)"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config has no model_type: for example model_type: qwen2_moe")
        if self.extend and (self.source is None or self.upcycle):
            raise ValueError("model.extend adds experts to a trained MoE: name it in model.source, without upcycle")
        return self
