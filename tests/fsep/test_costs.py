import numpy as np
import pytest

from fsep import Topology, cost

TOPOLOGY = Topology(4, 2, intra_gbps=80, inter_gbps=8, tokens_per_second=1e6, bytes_per_token=1000)


def test_by_hand():
    tokens = np.zeros((4, 2, 4), int)
    tokens[0, 0, 0] = 10  # at home: no traffic
    tokens[0, 1, 1] = 7  # inside the node
    tokens[1, 0, 0] = 4
    tokens[2, 1, 0] = 3  # across
    tokens[3, 1, 0] = 2
    tokens[1, 0, 3] = 1
    price = cost(tokens, TOPOLOGY)
    assert price.compute_s == pytest.approx(3 * 19 / 1e6)
    intra, inter = 4 * 7 * 8000 / 80e9, 4 * 5 * 8000 / 8e9  # most out of device 0; most into device 0
    assert price.comm_s == pytest.approx(max(intra, inter))
    assert price.total_s == pytest.approx(price.compute_s + price.comm_s)
    assert price.imbalance == pytest.approx(19 / (27 / 4))
    assert price.inter_node_fraction == pytest.approx(6 / 27)


def test_without_tokens():
    price = cost(np.zeros((4, 3, 4), int), TOPOLOGY)
    assert (price.total_s, price.imbalance, price.inter_node_fraction) == (0, 1, 0)


def test_refuses_other_sizes():
    with pytest.raises(ValueError, match=r"tokens has shape \(4, 3, 5\)"):
        cost(np.zeros((4, 3, 5)), TOPOLOGY)
