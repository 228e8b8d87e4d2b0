"""What the sections of the experiment file are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]
Tokens = Annotated[int, Field(ge=0)]


class ConfigError(ValueError):
    """A value in the experiment file that cannot work; the message names value, place and remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
