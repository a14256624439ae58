"""Batch scripts: what is asked of Slurm, and that every word reaches the command it is for."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.deploy.slurm.script import group_machines, quote_directive, write_script
from atoll.deploy.slurm.slurm_pool import GpuChoice
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.target import DeployError, StartOrder
from atoll.plan.plan import Node
from tests.deploy.slurm.builders import make_order
from tests.seeds import examples

SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
# Ends when every node has said something: when one ends, the others are told to.
MEET = '; for f in "$0"/n?.log; do until [ -s "$f" ]; do sleep 0.01; done; done'
SAY = 'trap "" TERM; printf "%s\\0" "$@" "${V-unset}"' + MEET
# "{port}" is the one thing that changes.
WORDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12
).filter(lambda word: "{port}" not in word)


def write(order: StartOrder, home: str = "/home/fleet", **fields: object) -> str:
    parts = group_machines(order)
    choices = [GpuChoice(f"gpu:{(p.first.gpu or '').lower()}", ("long",)) for p in parts]
    chosen = SlurmSettings.parse({"work_folder": "/work", **fields})
    return write_script(order, parts, choices, chosen, home)


def run_script(
    text: str, folder: Path, nodes: Sequence[str], *, plain: bool = False
) -> dict[str, list[str]]:
    """Run a script as bash would on a node, with a stand-in for srun; return what each node printed."""
    # Nobody needs to be looked after for a second here.
    text = text.replace("sleep 1 &", "sleep 0.01 &")
    srun = folder / "srun"
    srun.write_text(SRUN, "utf-8")
    srun.chmod(0o755)
    (folder / "signal").touch()
    for node in nodes:
        (folder / f"{node}.log").touch()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    environment.pop("V", None)
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    done = subprocess.run(
        ["bash"], input=text.encode(), env=environment, capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b""
    said = {node: (folder / f"{node}.log").read_bytes().decode("utf-8") for node in nodes}
    return {
        node: text.splitlines() if plain else text.split("\0")[:-1] for node, text in said.items()
    }


@examples(25)
@given(st.lists(WORDS, max_size=4), WORDS, st.sampled_from([("L4:1",), ("L4:1", "T4:2")]))
def test_any_words_and_environment_survive(
    words: list[str], value: str, kinds: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory(prefix="a b$c") as folder:
        order = make_order(
            kinds=kinds, argv=["bash", "-c", SAY, folder, *words], env=[("V", value)]
        )
        nodes = [command.node for command in order.commands]
        said = run_script(write(order, folder), Path(folder), nodes)
    assert said == {node: [*words, value] for node in nodes}


def test_the_port_is_put_in_and_is_the_same_everywhere(tmp_path: Path) -> None:
    order = make_order(
        argv=["bash", "-c", SAY, str(tmp_path), "--port={port}", "{port}", "a'{port}$b"]
    )
    first, second, third, _ = run_script(write(order, str(tmp_path)), tmp_path, ["n0"])["n0"]
    assert second.isdigit()
    assert first == f"--port={second}"
    assert third == f"a'{second}$b"


def test_nodes_say_that_they_run_and_how_they_ended(tmp_path: Path) -> None:
    order = make_order(argv=["true"])
    run_script(write(order, str(tmp_path)), tmp_path, ["n0"])
    assert (tmp_path / "n0.state").read_text("utf-8").split("\n") == ["ready", "ended 0", ""]


def test_when_one_node_ends_the_others_are_told_and_the_job_fails(tmp_path: Path) -> None:
    script = (
        'if [ -e "$0" ]; then trap "echo told; exit 0" TERM; while :; do sleep 0.01; done; fi; '
    )
    script += 'touch "$0"; exit 7'
    order = make_order(kinds=["L4:1", "T4:1"], argv=["bash", "-c", script, str(tmp_path / "first")])
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_script(write(order, str(tmp_path)), tmp_path, [])
    assert caught.value.returncode == 7
    states = [(tmp_path / f"n{i}.state").read_text("utf-8") for i in (0, 1)]
    assert "ready\nended 7\n" in states


def test_slices_of_one_machine_share_a_node_and_split_its_gpus(tmp_path: Path) -> None:
    nodes = [
        Node(
            id=f"n{i}",
            node_type="L4:8",
            market="on-demand",
            start=i,
            end=i + 1,
            tp=1,
            slot=0,
            gpu_ids=ids,
        )
        for i, ids in enumerate([(0, 1), (2,)])
    ]
    say = 'trap "" TERM; printf "%s\\0" "$CUDA_VISIBLE_DEVICES"' + MEET
    order = make_order(nodes=nodes, argv=["bash", "-c", say, str(tmp_path)])
    text = write(order, str(tmp_path))
    assert "#SBATCH --nodes=1\n" in text
    assert "#SBATCH --gres=gpu:l4:3\n" in text
    assert "hetjob" not in text
    given_by_slurm = f"export CUDA_VISIBLE_DEVICES=4,6,7\n{text}"
    assert run_script(given_by_slurm, tmp_path, ["n0", "n1"]) == {"n0": ["4,6"], "n1": ["7"]}


def test_equal_machines_are_one_component_and_others_are_heterogeneous() -> None:
    alike = write(make_order(kinds=["L4:2", "L4:2"]))
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=1\n" in alike
    assert "hetjob" not in alike
    assert "--relative=1 --gres=gpu:l4:2" in alike
    uneven = write(make_order(kinds=["L4:2", "T4:4", "L4:2"]))
    assert uneven.count("#SBATCH hetjob") == 1
    assert "--relative=1 --het-group=0 --gres=gpu:l4:2" in uneven
    assert "--relative=0 --het-group=1 --gres=gpu:t4:4" in uneven
    assert uneven.count("#SBATCH --comment=") == 2


def test_what_the_target_sets_is_asked_for() -> None:
    text = write(
        make_order(argv=["atoll", "join"]),
        account="lab",
        qos="high",
        constraint="a100&nvlink",
        time_limit_minutes=90,
        notice_s=300,
        options=["--mem=64G"],
        atoll=["/opt/venv/bin/python", "-m", "atoll"],
        modules=["cuda/12.4"],
    )
    for line in (
        "#SBATCH --account=lab",
        "#SBATCH --qos=high",
        "#SBATCH --constraint='a100&nvlink'",
        "#SBATCH --time=90",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --mem=64G",
        "#SBATCH --export=NONE",
        "#SBATCH --no-requeue",
        "module load cuda/12.4",
        "  exec /opt/venv/bin/python -m atoll join",
    ):
        assert line in text.splitlines()
    assert "--time" not in write(make_order())


def test_secrets_are_paths_in_a_script_and_nothing_more(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hush", "utf-8")
    text = write(make_order(secrets=[("ATOLL_TOKEN", str(token))]))
    assert "export ATOLL_TOKEN=/home/fleet/secrets/n0.ATOLL_TOKEN" in text
    assert "hush" not in text
    assert str(token) not in text


@pytest.mark.parametrize(
    "order",
    [
        make_order(argv=[]),
        make_order(argv=["a\0b"]),
        make_order(env=[("A B", "x")]),
        make_order(env=[("A=$(id)", "x")]),
        make_order(secrets=[("x;y", "/x")]),
    ],
)
def test_what_no_script_could_carry_is_refused(order: StartOrder) -> None:
    with pytest.raises(DeployError) as caught:
        write(order)
    assert caught.value.kind == "settings"


@pytest.mark.parametrize("text", ["a'b", "a\nb", "a\x7fb"])
def test_no_value_leaves_its_line(text: str) -> None:
    with pytest.raises(DeployError):
        quote_directive(text)


def test_nothing_dies_of_the_word_that_the_end_comes(tmp_path: Path) -> None:
    # Sent by hand: what Slurm does before the wall time ends.
    script = "kill -s USR1 $$; echo lives"
    text = write(make_order(argv=["bash", "-c", script]), str(tmp_path))
    assert run_script(text, tmp_path, ["n0"], plain=True) == {"n0": ["lives"]}
