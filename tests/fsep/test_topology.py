import numpy as np
import pytest

from fsep import Topology


def test_node_sizes_of_even_uneven_and_given_nodes():
    assert Topology(16, 8).node_sizes.tolist() == [8, 8]
    assert Topology(13, 6).node_sizes.tolist() == [6, 6, 1]
    assert Topology(3, 8).node_sizes.tolist() == [3]
    unequal = Topology(7, [2, 4, 1])
    assert unequal.node_sizes.tolist() == [2, 4, 1]
    assert unequal.node_of.tolist() == [0, 0, 1, 1, 1, 1, 2]
    assert unequal.node_start.tolist() == [0, 2, 6, 7]
    assert unequal.nodes == 3


def test_seconds_a_token_by_hand():
    topology = Topology(8, 8, intra_gbps=800, inter_gbps=80, tokens_per_second=1e6, bytes_per_token=1000)
    # forward 1 us, backward 2 us; four passes of 8000 bits.
    np.testing.assert_allclose(topology.seconds, [3e-6, 4e-8, 4e-7])


def test_from_hardware_counts_the_flops_of_a_gated_expert():
    topology = Topology.from_hardware("A100", 16, hidden=1024, expert_width=2048, utilisation=0.5)
    assert topology.devices_per_node == 8
    assert topology.tokens_per_second == pytest.approx(312e12 / 2 / (2 * 3 * 1024 * 2048))
    assert topology.bytes_per_token == 2048


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(devices=0), "topology.devices is 0"),
        (dict(devices=2.5), "topology.devices is 2.5"),
        (dict(devices=True), "topology.devices is True"),
        (dict(devices=8, devices_per_node=0), "topology.devices_per_node is 0"),
        (dict(devices=8, devices_per_node=[4, 3]), "adds up to 7 but topology.devices is 8"),
        (dict(devices=8, devices_per_node=[8, 0]), "at least one device"),
        (dict(devices=8, intra_gbps=0), "topology.intra_gbps is 0"),
        (dict(devices=8, inter_gbps=float("nan")), "topology.inter_gbps is nan"),
        (dict(devices=8, tokens_per_second=float("inf")), "topology.tokens_per_second is inf"),
    ],
)
def test_refuses_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Topology(**arguments)


def test_from_hardware_refuses_bad_values():
    with pytest.raises(ValueError, match="hardware is 'abacus': choose one of"):
        Topology.from_hardware("abacus", 8)
    with pytest.raises(ValueError, match="utilisation=1.5"):
        Topology.from_hardware("a100", 8, utilisation=1.5)
