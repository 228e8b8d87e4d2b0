import numpy as np
import pytest

from fsep import Topology, cost, lower_bound, plan, route, simulate, synthesize
from fsep.simulation import METHODS, PLANNERS, ROUTINGS

TRACE = synthesize("dirichlet", devices=4, experts=6, steps=5, microbatches=2, skew=2, tokens_per_device=512)
TOPOLOGY = Topology(4, 2)


def test_means_by_hand():
    (result,) = simulate(TRACE, TOPOLOGY, 3, planners=["fsep"], stale=[2], snapshots=None)
    loads = TRACE.tokens[:, 0]
    prices, bounds = [], []
    for step in range(2, 5):
        for micro in range(2):
            layout = plan(loads[step - 2, micro], TOPOLOGY, 3)
            prices.append(cost(route(loads[step, micro], layout, TOPOLOGY), TOPOLOGY))
            bounds.append(lower_bound(loads[step, micro], TOPOLOGY, 3))
    assert result.snapshots == 6
    assert result.imbalance == pytest.approx(np.mean([price.imbalance for price in prices]))
    assert result.imbalance_p95 == pytest.approx(np.percentile([price.imbalance for price in prices], 95))
    assert result.inter_node_fraction == pytest.approx(np.mean([price.inter_node_fraction for price in prices]))
    assert result.step_ms == pytest.approx(1e3 * np.mean([price.total_s for price in prices]))
    assert result.bound_ms == pytest.approx(1e3 * np.mean(bounds))
    assert result.worst_over_bound == pytest.approx(
        max(price.total_s / least for price, least in zip(prices, bounds, strict=True))
    )
    assert result.plan_ms > 0 and result.route_ms > 0


def test_every_method_and_none_beats_ours():
    results = simulate(TRACE, TOPOLOGY, 3, stale=[0], snapshots=4, bound=False)
    assert [(r.planner, r.routing) for r in results] == [(p, r) for p, rs in METHODS.items() for r in rs]
    assert set(METHODS) == set(PLANNERS)
    assert {routing for routings in METHODS.values() for routing in routings} <= set(ROUTINGS)
    assert all(results[0].step_ms <= other.step_ms for other in results)
    assert all(result.snapshots == 4 and np.isnan(result.bound_ms) for result in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(planners=["magic"]), "planner is 'magic': choose one of fsep"),
        (dict(topology=Topology(8, 2)), "the trace has 4 devices but topology.devices is 8"),
        (dict(stale=[5]), "stale is 5 but the trace has 5 steps: give 0 to 4"),
        (dict(snapshots=0), "snapshots is 0"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        simulate(**dict(trace=TRACE, topology=TOPOLOGY, slots=3) | change)
