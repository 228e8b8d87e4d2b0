"""Targets on recorded traces; runs where FSEP_TRACES names a folder of load traces (.npz); none are shipped."""

import os
from pathlib import Path

import numpy as np
import pytest

from fsep import LoadTrace, Topology, simulate

FOLDER = os.environ.get("FSEP_TRACES")
PATHS = sorted(Path(FOLDER).glob("*.npz")) if FOLDER else []


@pytest.mark.skipif(not PATHS, reason="FSEP_TRACES names no folder with traces")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize(("slots", "imbalance", "inter_node"), [(4, 1.01, 0.02), (8, 1.002, 0.005)])
def test_balance_and_traffic_of_fresh_plans(path, slots, imbalance, inter_node):
    trace = LoadTrace.load(path)
    results = simulate(trace, Topology(trace.devices, 8), slots, snapshots=40)
    ours = results[0]
    assert ours.imbalance <= imbalance
    assert ours.inter_node_fraction <= inter_node
    assert ours.step_ms <= 1.01 * ours.bound_ms
    assert all(ours.step_ms <= other.step_ms for other in results)
    assert np.isfinite(ours.worst_over_bound)
