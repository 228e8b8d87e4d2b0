"""Section `fsep` of the experiment file: sharded experts, for every stage whose experts are fsep."""

from typing import Annotated, Literal

from pydantic import Field

from disco.schema import Positive, Section, Tokens


class ExpertSharding(Section):
    """Fully sharded experts: how many each process rebuilds, where, and who decides."""

    slots: Positive | None = Field(
        None, description="experts that a process rebuilds at a time; absent = twice its even share, at most all"
    )
    planner: Literal["moving", "fixed"] = Field(
        "moving", description="layouts follow the load, or stay as they are; only fixed ones resume bit for bit"
    )
    forecast: Literal["auto", "last", "mean", "trend"] = Field(
        "auto", description="of the next load from past ones"
    )
    replan_every: Positive = Field(1, description="micro-batches from one plan to the next")
    threshold: Annotated[float, Field(ge=0)] = Field(
        0.01, description="least gain in modelled step time for which a layer's layout changes"
    )
    hardware: str = Field("a100", description="device in fsep's table, by whose speeds layouts are judged")
    devices_per_node: Positive | list[Positive] | None = Field(
        None, description="one number, or that of every node; absent = processes over launch.nodes"
    )
    prefetch: Tokens = Field(1, description="layers whose experts are rebuilt ahead of their use")
    delay_reshard: bool = Field(True, description="a layer's gradients travel while an earlier layer computes")
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="after which a process that does not answer is given up"
    )
