"""Block coordinate descent: full-parameter training in the memory of a part, as a DeepSpeed-shaped engine."""

from bcd.blocks import Block, Partition, Piece, partition
from bcd.config import Config
from bcd.engine import Engine, initialize
from bcd.memory import Estimate, memory, plan
from bcd.schedule import BlockSchedule

__all__ = [
    "Block",
    "BlockSchedule",
    "Config",
    "Engine",
    "Estimate",
    "Partition",
    "Piece",
    "initialize",
    "memory",
    "partition",
    "plan",
]
