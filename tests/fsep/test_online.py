"""The planner in training: alone, and agreed on by real gloo processes."""

import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from fsep import Planner, Topology, cost, plan, route, synthesize

TRACE = synthesize("dirichlet", devices=4, experts=8, steps=10, layers=2, skew=3, seed=0).tokens[:, :, 0]
TOPOLOGY = Topology(4, 2)


def wait_for_plan(planner):
    while planner._pending is not None and not planner._pending.done():
        time.sleep(0.001)


def test_alone_in_the_foreground_follows_the_load():
    planner = Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last", background=False)
    assert planner.observe(TRACE[0])
    assert planner.adopted == 1
    tokens = route(TRACE[0, 1], planner.layouts[1], TOPOLOGY)
    assert cost(tokens, TOPOLOGY).imbalance < 1.05
    for _ in range(3):
        assert not planner.observe(TRACE[0])  # nothing new, nothing changes


def test_alone_in_the_background_adopts_a_step_later():
    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner:
        uniform = planner.layouts
        assert not planner.observe(TRACE[0])
        assert planner.layouts == uniform
        wait_for_plan(planner)
        assert planner.observe(TRACE[1])
        assert planner.layouts != uniform


def test_a_slow_plan_never_blocks(monkeypatch):
    release = threading.Event()

    def slow(*arguments, **keywords):
        release.wait()
        return plan(*arguments, **keywords)

    with Planner(TOPOLOGY, 3, layers=2, experts=8) as planner:
        before = planner.layouts
        monkeypatch.setattr("fsep.online.plan", slow)
        try:
            changed = [planner.observe(TRACE[step]) for step in range(4)]
            assert changed == [False] * 4 and planner.late == 3 and planner.layouts == before
        finally:
            release.set()
        wait_for_plan(planner)
        assert planner.observe(TRACE[4])


def test_threshold_keeps_layouts():
    planner = Planner(TOPOLOGY, 3, layers=2, experts=8, threshold=1e6, background=False)
    assert not any(planner.observe(TRACE[step]) for step in range(5))


def test_plans_only_every_so_often():
    swapped = np.stack([TRACE[0], TRACE[0][..., ::-1]])  # the other load at every step, and so at each third
    planner = Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last", every=3, background=False)
    assert [step for step in range(9) if planner.observe(swapped[step % 2])] == [0, 3, 6]


def test_failure_in_the_thread_comes_out(monkeypatch):
    with Planner(TOPOLOGY, 3, layers=2, experts=8) as planner:

        def broken(*_arguments, **_keywords):
            raise RuntimeError("planning failed")

        monkeypatch.setattr("fsep.online.plan", broken)
        planner.observe(TRACE[0])
        wait_for_plan(planner)
        with pytest.raises(RuntimeError, match="planning failed"):
            planner.observe(TRACE[1])


def test_one_device():
    planner = Planner(Topology(1), 2, layers=1, experts=2, background=False)
    planner.observe(np.array([[3, 4]]))
    assert planner.layouts[0].replicas.all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layers=0), "layers is 0"),
        (dict(slots=1), "slots is 1"),
        (dict(every=0), "every is 0"),
        (dict(threshold=-0.1), "threshold is -0.1"),
        (dict(forecast="oracle"), "forecast is 'oracle'"),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        Planner(**dict(topology=TOPOLOGY, slots=3, layers=2, experts=8) | change)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (np.ones((2, 8)), r"load has shape \(2, 8\): give \(2, 4, 8\)"),
        (np.full((2, 4, 8), 0.5), "fractional"),
        (np.full((2, 4, 8), -1), "negative"),
    ],
)
def test_observe_refuses(load, message):
    planner = Planner(TOPOLOGY, 3, layers=2, experts=8, background=False)
    with pytest.raises(ValueError, match=message):
        planner.observe(load)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_rank(rank, size, port, scenario, results):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        results.put((rank, scenario(rank)))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(scenario, size):
    """What ``scenario(rank)`` returns on each rank."""
    context = mp.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=as_rank, args=(rank, size, port, scenario, results)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * size
    found = dict(results.get() for _ in range(size))
    return [found[rank] for rank in range(size)]


@contextmanager
def patched_plan(replacement, here):
    """Let the planning thread of this rank call ``replacement``."""
    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr("fsep.online.plan", replacement)
        yield


def summary(planner):
    return [layout.digest() for layout in planner.layouts], planner.adopted, planner.rejected


def agree(rank):
    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner:
        seen = []
        for step in range(8):
            wait_for_plan(planner)
            planner.observe(TRACE[step, :, rank])
            seen.append(summary(planner))
    return seen


def late_rank(rank):
    release = threading.Event()

    def slow(*arguments, **keywords):
        release.wait()
        return plan(*arguments, **keywords)

    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner, patched_plan(slow, rank == 2):
        seen = []
        for step in range(6):
            if rank != 2 or step > 3:
                wait_for_plan(planner)
            planner.observe(TRACE[step, :, rank])
            seen.append((*summary(planner), planner.late))
            if step == 3:
                release.set()
    return seen


def differing_rank(rank):
    def rolled(load, *rest, **keywords):
        return plan(np.roll(load, 1, axis=1), *rest, **keywords)

    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner, patched_plan(rolled, rank == 1):
        before = summary(planner)
        for step in range(4):
            wait_for_plan(planner)
            planner.observe(TRACE[step, :, rank])
    return before, summary(planner)


def all_scenarios(rank):
    return agree(rank), late_rank(rank), differing_rank(rank)


@pytest.fixture(scope="module")
def ranks():
    """(agree, late_rank, differing_rank) of four ranks: one launch, for launching takes most of the time."""
    return list(zip(*on_ranks(all_scenarios, 4), strict=True))


def test_ranks_agree_and_equal_a_single_process(ranks):
    agreed = ranks[0]
    assert all(seen == agreed[0] for seen in agreed)
    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as alone:
        for step in range(8):
            wait_for_plan(alone)
            alone.observe(TRACE[step])
            assert summary(alone) == agreed[0][step]
    assert alone.adopted > 0


def test_a_late_rank_makes_all_wait(ranks):
    seen = ranks[1][0]
    assert all(other == seen for other in ranks[1])
    assert [entry[3] for entry in seen[:4]] == [0, 1, 2, 3]
    assert seen[3][0] == seen[0][0]  # still the first layouts
    assert seen[5][1] >= 1  # adopted once the rank was done


def test_a_differing_rank_makes_all_keep_the_old_layouts(ranks):
    for before, after in ranks[2]:
        assert after[0] == before[0]
        assert after[1:] == (0, 3)


def wrong_size(rank):
    try:
        Planner(Topology(3), 3, layers=1, experts=8)
    except ValueError as error:
        return str(error)


def test_topology_must_fit_the_ranks():
    assert all("3 but the process group has 2 ranks" in message for message in on_ranks(wrong_size, 2))
