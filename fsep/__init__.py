"""Load traces, cost model, expert placement and token routing for mixture-of-experts training."""

from fsep.cost import Cost, cost
from fsep.layout import Layout
from fsep.plan import plan
from fsep.route import route
from fsep.topology import HARDWARE, Topology
from fsep.traces import LoadTrace, synthesize

__all__ = ["HARDWARE", "Cost", "Layout", "LoadTrace", "Topology", "cost", "plan", "route", "synthesize"]
