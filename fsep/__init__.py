"""Load traces, cost model, expert placement and token routing for mixture-of-experts training; sharded experts.

Names are imported on first use, so that ``import fsep`` and ``fsep --help`` stay quick.
"""

from importlib import import_module

_MODULE_OF = {
    "Cost": "costs",
    "Forecaster": "forecast",
    "HARDWARE": "topology",
    "Layout": "layout",
    "LoadTrace": "traces",
    "Planner": "online",
    "Topology": "topology",
    "RankError": "link",
    "TraceRecorder": "record",
    "attach": "sharding",
    "load_checkpoint": "checkpoint",
    "load_pretrained": "pretrained",
    "save_checkpoint": "checkpoint",
    "save_pretrained": "pretrained",
    "cost": "costs",
    "layout_bound": "bounds",
    "lower_bound": "bounds",
    "plan": "planner",
    "route": "routing",
    "route_copies": "routing",
    "simulate": "simulation",
    "stats": "monitor",
    "synthesize": "traces",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fsep' has no attribute {name!r}")
    return getattr(import_module(f"fsep.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
