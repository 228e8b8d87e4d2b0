"""Lower bounds on the modelled step time, by linear and integer programming (scipy's HiGHS).

Shapes: N devices, E experts, G groups of source devices.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from fsep.check import check_load, check_slots
from fsep.layout import Layout
from fsep.topology import Topology


def lower_bound(
    load: np.ndarray, topology: Topology, slots: int, *, exact: bool = False, time_limit: float | None = None
) -> float:
    """Seconds that no layout and routing of this load can beat, in the model of ``cost``.

    The linear relaxation lets a device hold fractions of experts and sums the sources of a node. ``exact=True``
    keeps devices apart and placements whole (mixed-integer; minutes beyond about 8 devices and 16 experts). Tokens
    are divisible in both, so an attained cost can exceed the exact bound by the rounding of single tokens.

    Args:
        load: [N, E] whole or fractional tokens. time_limit: seconds for HiGHS; at the limit the best proven bound
            is returned, which still is a bound.

    Raises:
        ValueError: bad input, as ``plan``. RuntimeError: HiGHS found no bound in the time.
    """
    load_NE = check_load(load, topology, whole=True)
    slots = check_slots(slots, *load_NE.shape)
    return _solve(load_NE, topology, slots=slots, layout=None, apart=exact, time_limit=time_limit)


def layout_bound(load: np.ndarray, layout: Layout, topology: Topology) -> float:
    """Seconds that no routing over this layout can beat: what ``route`` is measured against."""
    load_NE = check_load(load, topology, experts=layout.experts, whole=True)
    return _solve(load_NE, topology, slots=layout.slots, layout=layout, apart=True, time_limit=None)


class _Rows:
    """Constraints ``sum(coefficient * variable) <= or == bound``, collected row by row in blocks."""

    def __init__(self) -> None:
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.low: list[np.ndarray] = []
        self.high: list[np.ndarray] = []
        self.count = 0

    def add(self, rows: int, entries: list[tuple], low: float | np.ndarray, high: float | np.ndarray) -> None:
        """Each entry is (row within the block, variable, coefficient), broadcast together."""
        for row, variable, coefficient in entries:
            row, variable, coefficient = np.broadcast_arrays(row, variable, coefficient)
            self.entries.append((row.ravel() + self.count, variable.ravel(), coefficient.ravel()))
        self.low.append(np.broadcast_to(low, rows))
        self.high.append(np.broadcast_to(high, rows))
        self.count += rows

    def constraint(self, variables: int) -> LinearConstraint:
        row, variable, value = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        matrix = coo_array((value.astype(float), (row, variable)), shape=(self.count, variables)).tocsr()
        return LinearConstraint(matrix, np.concatenate(self.low), np.concatenate(self.high))


def _solve(
    load_NE: np.ndarray,
    topology: Topology,
    *,
    slots: int,
    layout: Layout | None,
    apart: bool,
    time_limit: float | None,
) -> float:
    """Minimise T and K weighed: flow f[g, e, j], own flow s[j, e], placement x[e, j], largest load T, comm K."""
    N, E = load_NE.shape
    total = load_NE.sum()
    if total == 0:
        return 0.0
    group_of = np.arange(N) if apart else topology.node_of
    G = group_of[-1] + 1
    size_G = np.bincount(group_of)
    node_of = topology.node_of
    node_of_group = node_of[np.searchsorted(group_of, np.arange(G))]
    # In units of the mean device load and its compute time, so that HiGHS's tolerances mean the same everywhere.
    load_NE = load_NE * (N / total)
    compute, intra, inter = topology.seconds / topology.seconds[0]
    load_GE = np.zeros((G, E))
    np.add.at(load_GE, group_of, load_NE)

    f = np.arange(G * E * N).reshape(G, E, N)
    s = f.size + np.arange(N * E).reshape(N, E)
    x = f.size + s.size + np.arange(E * N).reshape(E, N)
    T, K = f.size + s.size + x.size, f.size + s.size + x.size + 1
    n, e, g = np.arange(N), np.arange(E), np.arange(G)
    rows = _Rows()
    rows.add(G * E, [(np.arange(G * E)[:, None], f.reshape(G * E, N), 1)], load_GE.ravel(), load_GE.ravel())
    at = np.arange(f.size).reshape(f.shape)
    rows.add(f.size, [(at, f, 1), (at, np.broadcast_to(x, f.shape), -load_GE[:, :, None])], -np.inf, 0)
    at = np.arange(s.size).reshape(s.shape)
    own = f[group_of[:, None], e[None, :], n[:, None]]
    rows.add(s.size, [(at, s, 1), (at, own, -1)], -np.inf, 0)
    rows.add(s.size, [(at, s, 1), (at, x.T, -load_NE)], -np.inf, 0)
    rows.add(N, [(n, x, 1)], -np.inf, slots)
    rows.add(E, [(e[:, None], x, 1)], 1, np.inf)
    rows.add(N, [(n, f, 1), (n, T, -1)], -np.inf, 0)
    same = node_of_group[:, None] == node_of[None, :]
    local = np.broadcast_to(same[:, None, :], f.shape).astype(float)
    rows.add(N, [(n, f, intra * local), (n[:, None], s, -intra), (n, K, -1)], -np.inf, 0)
    rows.add(N, [(n, f, inter * (1 - local)), (n, K, -1)], -np.inf, 0)
    source = g[:, None, None]
    own_entry = (group_of[:, None], s, -intra)
    rows.add(G, [(source, f, intra * local), own_entry, (g, K, -size_G)], -np.inf, 0)
    rows.add(G, [(source, f, inter * (1 - local)), (g, K, -size_G)], -np.inf, 0)

    variables = K + 1
    objective = np.zeros(variables)
    objective[[T, K]] = compute, 1
    low, high = np.zeros(variables), np.full(variables, np.inf)
    high[x] = 1
    whole = np.zeros(variables)
    if layout is not None:
        low[x] = high[x] = layout.replicas
    elif apart:
        whole[x] = 1
    options = {} if time_limit is None else {"time_limit": time_limit}
    found = milp(
        objective,
        constraints=rows.constraint(variables),
        bounds=Bounds(low, high),
        integrality=whole,
        options=options,
    )
    bound = found.mip_dual_bound if whole.any() else found.fun
    if bound is None or not np.isfinite(bound):
        raise RuntimeError(f"HiGHS found no bound ({found.message}): give it more time or a smaller problem")
    return float(bound) * total / N * topology.seconds[0]
