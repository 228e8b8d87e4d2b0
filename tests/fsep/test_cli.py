import json
import subprocess
import sys

import pytest

from fsep import Topology, cost, plan, route, synthesize
from fsep.cli import main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    arguments = "clustered --devices 4 --experts 6 --steps 4 --tokens-per-device 256".split()
    run("synthesize", arguments[0], str(path), *arguments[1:])
    return path


def run(*arguments):
    """The exit status of ``fsep arguments``."""
    before, sys.argv = sys.argv, ["fsep", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv = before
    return 0


def test_simulate(trace, tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert (
        run(*f"simulate {trace} --slots 3 --devices-per-node 2 --planner all --stale 0,1 --json {out}".split()) == 0
    )
    printed = capsys.readouterr().out
    rows = json.loads(out.read_text())["results"]
    assert len(rows) == 20 and {row["stale"] for row in rows} == {0, 1}
    assert all(row["step_ms"] >= row["bound_ms"] * (1 - 1e-6) for row in rows)
    assert all(name in printed for name in ("fsep", "eplb-hierarchical", "least-loaded", "imbalance", "bound"))


def test_simulate_without_bound_writes_valid_json(trace, tmp_path):
    out = tmp_path / "rows.json"
    assert run(*f"simulate {trace} --planner fsep,eplb --no-bound --json {out} --devices-per-node 3,1".split()) == 0
    assert [row["bound_ms"] for row in json.loads(out.read_text())["results"]] == [None] * 3


def test_plan(trace, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert run(*f"plan {trace} --slots 3 --devices-per-node 2 --step 1 --json {out}".split()) == 0
    load = synthesize("clustered", devices=4, experts=6, steps=4, tokens_per_device=256).tokens[1, 0, 0]
    topology = Topology.from_hardware("a100", 4, devices_per_node=2)
    layout = plan(load, topology, 3)
    found = json.loads(out.read_text())
    assert found["table"] == layout.table.tolist()
    assert found["cost"]["total_s"] == cost(route(load, layout, topology), topology).total_s
    assert "device    3" in capsys.readouterr().out


def test_plot(trace, tmp_path):
    assert (
        run(*f"plot {trace} {tmp_path / 'pictures'} --slots 3 --devices-per-node 2 --planner fsep,eplb".split())
        == 0
    )
    for name in ("load.png", "layout.png", "planners.png"):
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate none.npz", "none.npz does not exist"),
        ("simulate TRACE --slots 1", "slots is 1: 4 devices then hold 4 experts of 6; give at least 2"),
        ("simulate TRACE --planner best", "planner is 'best'"),
        ("simulate TRACE --stale soon", "--stale is 'soon'"),
        ("simulate TRACE --stale 9", "stale is 9"),
        ("simulate TRACE --devices-per-node 3,3", "adds up to 6"),
        ("simulate TRACE --hardware abacus", "hardware is 'abacus'"),
        ("plan TRACE --step 4", "--step is 4 but the trace has 4"),
        ("plan TRACE --layer -2", "--layer is -2"),
        ("synthesize gauss TRACE", "kind is 'gauss'"),
        ("synthesize zipf no/such/folder.npz", "No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(trace, capsys, arguments, message):
    capsys.readouterr()
    assert run(*arguments.replace("TRACE", str(trace)).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_help_loads_nothing_heavy():
    code = "import sys; sys.argv = ['fsep', '--help']\nfrom fsep.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "print({'numba', 'scipy', 'torch', 'matplotlib', 'numpy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "simulate" in out and out.strip().endswith("set()")
