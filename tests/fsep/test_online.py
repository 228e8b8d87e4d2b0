"""The planner in training: alone, and agreed on by real gloo processes."""

import socket
import threading
import time

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
        for step in range(4):
            assert not planner.observe(TRACE[step])
        assert planner.late == 3 and planner.layouts == before
        release.set()
        wait_for_plan(planner)
        assert planner.observe(TRACE[4])


def test_threshold_keeps_layouts():
    planner = Planner(TOPOLOGY, 3, layers=2, experts=8, threshold=1e6, background=False)
    assert not any(planner.observe(TRACE[step]) for step in range(5))


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
    import fsep.online

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        results.put((rank, scenario(rank, fsep.online)))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(scenario, size=4):
    context = mp.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=as_rank, args=(rank, size, port, scenario, results)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    found = dict(results.get() for _ in range(size))
    return [found[rank] for rank in range(size)]


def summary(planner):
    return [layout.digest() for layout in planner.layouts], planner.adopted, planner.rejected


def agree(rank, _online):
    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner:
        seen = []
        for step in range(8):
            wait_for_plan(planner)
            planner.observe(TRACE[step, :, rank])
            seen.append(summary(planner))
    return seen


def late_rank(rank, online):
    release = threading.Event()
    if rank == 2:
        original = online.plan

        def slow(*arguments, **keywords):
            release.wait()
            return original(*arguments, **keywords)

    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner:
        if rank == 2:
            online.plan = slow
        seen = []
        for step in range(6):
            if rank != 2 or step > 3:
                wait_for_plan(planner)
            planner.observe(TRACE[step, :, rank])
            seen.append((*summary(planner), planner.late))
            if step == 3:
                release.set()
    return seen


def differing_rank(rank, online):
    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as planner:
        if rank == 1:
            original = online.plan
            online.plan = lambda load, *rest, **keywords: original(np.roll(load, 1, axis=1), *rest, **keywords)
        before = summary(planner)
        for step in range(4):
            wait_for_plan(planner)
            planner.observe(TRACE[step, :, rank])
    return before, summary(planner)


def test_ranks_agree_and_equal_a_single_process():
    ranks = on_ranks(agree)
    assert all(seen == ranks[0] for seen in ranks)
    with Planner(TOPOLOGY, 3, layers=2, experts=8, forecast="last") as alone:
        for step in range(8):
            wait_for_plan(alone)
            alone.observe(TRACE[step])
            assert summary(alone) == ranks[0][step]
    assert alone.adopted > 0


def test_a_late_rank_makes_all_wait():
    ranks = on_ranks(late_rank)
    assert all(seen == ranks[0] for seen in ranks)
    late = [entry[3] for entry in ranks[0]]
    assert late[:4] == [0, 1, 2, 3]
    assert ranks[0][3][0] == ranks[0][0][0]  # still the first layouts
    assert ranks[0][5][1] >= 1  # adopted once the rank was done


def test_a_differing_rank_makes_all_keep_the_old_layouts():
    for before, after in on_ranks(differing_rank):
        assert after[0] == before[0]
        assert after[1:] == (0, 3)


def wrong_size(rank, _online):
    try:
        Planner(Topology(3), 3, layers=1, experts=8)
    except ValueError as error:
        return str(error)


def test_topology_must_fit_the_ranks():
    assert all("3 but the process group has 2 ranks" in message for message in on_ranks(wrong_size, 2))
