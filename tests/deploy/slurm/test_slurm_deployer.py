"""Orders to Slurm and what is seen of them, with a stand-in for its commands."""

from __future__ import annotations

import json
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.deploy.slurm.runner import ProcessRunner, SlurmAnswer
from atoll.deploy.slurm.slurm_deployer import SlurmDeployer
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.slurm.slurm_target import SlurmTarget
from atoll.deploy.target import DeployError, InstanceStatus, TargetSite
from atoll.plan.plan import Node
from atoll.plan.problem import Offer
from tests.deploy.slurm.builders import NOW_S, FakeSlurm, make_order


class Stage:
    """A deployer on a stand-in, with a clock that stands still until it is set."""

    def __init__(self, folder: Path, **fields: object) -> None:
        self.slurm = FakeSlurm()
        self.now_s = NOW_S
        self.settings = SlurmSettings.parse({"work_folder": str(folder), **fields})
        self.deployer = self.controller()

    def controller(self) -> SlurmDeployer:
        """Another controller on the same cluster and folder."""
        return SlurmDeployer(self.settings, runner=self.slurm, clock=lambda: self.now_s)

    def only(self) -> InstanceStatus:
        (status,) = self.deployer.list("f")
        return status

    def home(self) -> Path:
        (path,) = Path(self.settings.work_folder).glob("f-*/i-*")
        return path

    def run(self, handle: str, **fields: object) -> None:
        running = {"job_state": "RUNNING", "start_time": int(NOW_S), "nodes": "n1", **fields}
        self.slurm.set_state(handle, **running)

    def say(self, node: str, line: str) -> None:
        with (self.home() / f"{node}.state").open("a") as file:
            file.write(f"{line}\n")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "work")


def test_an_instance_from_submission_to_its_end(stage: Stage) -> None:
    status = stage.deployer.start(make_order())
    assert (status.handle, status.state) == ("100", "starting")
    assert "Resources" in stage.only().reason
    stage.run("100", time_limit=60, end_time=int(NOW_S) + 3600)
    assert stage.only().state == "starting"
    stage.say("n0", "ready")
    ready = stage.only()
    assert (ready.state, ready.ends_s, ready.hosts) == ("ready", NOW_S + 3600, ("n1",))
    stage.deployer.drain("100", 1)
    stage.deployer.drain("100", 1)
    assert stage.slurm.calls("scancel") == [("scancel", "--signal=TERM", "--batch", "100")]
    assert stage.only().state == "draining"
    stage.slurm.set_state("100", job_state="COMPLETED", end_time=int(NOW_S) + 9)
    gone = stage.only()
    assert (gone.state, gone.reason, gone.kind) == ("gone", "was drained", None)
    stage.slurm.forget()
    assert stage.only() == InstanceStatus(
        "100",
        gone.labels,
        "gone",
        NOW_S + 9,
        reason="was drained",
        instance=make_order().instance,
    )
    stage.now_s += stage.settings.keep_s + 10
    assert stage.deployer.list("f") == ()


@pytest.mark.parametrize("told", [True, False])
def test_a_node_that_is_drained_is_a_notice(stage: Stage, told: bool) -> None:
    stage.deployer.start(make_order(ready_s=900.0))
    stage.run("100")
    stage.say("n0", "ready")
    assert stage.only().ends_s is None
    node: dict[str, object] = {"name": "n1", "state": "allocated", "state_flags": ["DRAIN"]}
    if told:
        node["reason_changed_at"] = int(NOW_S) - 100
    stage.slurm.nodes = json.dumps({"nodes": [node]})
    status = stage.only()
    ends_s = NOW_S + (800 if told else 900)
    assert (status.state, status.reason) == ("ready", "node n1 is being drained")
    assert status.ends_s == ends_s
    # The end comes nearer, and stays where Slurm does not answer for a while.
    stage.now_s += 300
    assert stage.only().ends_s == ends_s
    stage.slurm.nodes = "not JSON"
    assert stage.only().ends_s == ends_s
    stage.run("100", time_limit=10, end_time=int(NOW_S) + 400)
    assert stage.only().ends_s == NOW_S + 400
    stage.slurm.nodes = json.dumps({"nodes": [{"name": "n1", "state": "allocated"}]})
    stage.run("100", time_limit=None)
    assert stage.only().ends_s is None


def test_starting_twice_is_starting_once_for_any_controller(stage: Stage) -> None:
    stage.deployer.start(make_order())
    again = stage.controller().start(make_order())
    assert again.handle == "100"
    assert len(stage.slurm.calls("sbatch")) == 1
    stage.slurm.set_state("100", job_state="FAILED", end_time=int(NOW_S), exit_code=256)
    assert stage.controller().start(make_order()).state == "failed"
    assert len(stage.slurm.calls("sbatch")) == 1


def test_a_submission_that_did_not_answer_is_found_again(stage: Stage) -> None:
    stage.slurm.loses_answer = True
    assert stage.deployer.start(make_order()).handle == "100"
    stage.slurm.loses_answer = False
    assert stage.deployer.start(make_order()).handle == "100"
    assert len(stage.slurm.calls("sbatch")) == 1
    assert stage.deployer.logs("100") == ""


def test_a_job_without_a_folder_here_is_still_seen(stage: Stage, tmp_path: Path) -> None:
    stage.deployer.start(make_order())
    stage.run("100")
    elsewhere = SlurmSettings(work_folder=str(tmp_path / "other"))
    other = SlurmDeployer(elsewhere, runner=stage.slurm, clock=lambda: NOW_S)
    (status,) = other.list("f")
    assert (status.handle, status.state) == ("100", "ready")


def test_hosts_that_are_set_aside_are_left_out(stage: Stage, tmp_path: Path) -> None:
    settings = SlurmSettings(work_folder=str(tmp_path), options=("--exclude=n[7-8]", "--exclusive"))
    deployer = SlurmDeployer(settings, runner=stage.slurm, clock=lambda: NOW_S)
    order = replace(make_order(), avoid_hosts=("n3", "another-targets"))
    lines = deployer.dry_run(order).splitlines()
    assert [line for line in lines if "exclu" in line] == [
        "#SBATCH --exclude=n3,n[7-8]",
        "#SBATCH --exclusive",
    ]
    with pytest.raises(DeployError, match=r"0 nodes .* not set aside \(n1, n3\)") as caught:
        deployer.start(replace(order, avoid_hosts=("n1", "n3")))
    assert caught.value.kind == "capacity"
    node = Node(id="n0", node_type="L4:1", market="on-demand", start=0, end=1, tp=1, host="n3")
    with pytest.raises(DeployError, match="node n3 is set aside"):
        deployer.start(replace(make_order(nodes=[node]), avoid_hosts=("n3",)))
    assert stage.slurm.calls("sbatch") == []


def test_what_ends_untold_has_failed_at_once_and_keeps_its_reason(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.run("100")
    stage.slurm.set_state("100", job_state="NODE_FAIL", end_time=int(NOW_S))
    stage.slurm.ending = [100]
    seen = stage.only()
    assert (seen.state, seen.reason, seen.kind) == ("failed", "a node of it failed", "ended")
    stage.deployer.stop("100", 1)
    assert stage.slurm.calls("scancel") == []
    stage.slurm.ending = []
    seen = stage.only()
    assert (seen.state, seen.reason) == ("gone", "a node of it failed")


@pytest.mark.parametrize(
    ("code", "word", "kind"),
    [
        (3, "the model is not there", "settings"),
        (1, "torch.OutOfMemoryError: CUDA out of memory", "memory"),
        (137, "", "memory"),
        (127, "vllm: command not found", "image"),
    ],
)
def test_a_command_that_never_was_ready_says_what_was_wrong_with_it(
    stage: Stage, code: int, word: str, kind: str
) -> None:
    stage.deployer.start(make_order())
    stage.run("100")
    (stage.home() / "n0.log").write_text(f'{word}\n{{"time":1,"event":"x"}}\n', "utf-8")
    stage.say("n0", f"ended {code}")
    seen = stage.only()
    assert (seen.state, seen.kind) == ("failed", kind)
    assert seen.reason.endswith(word)


def test_what_somebody_cancels_ends_and_nothing_has_failed(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.run("100")
    stage.slurm.set_state("100", job_state="CANCELLED", end_time=int(NOW_S))
    stage.slurm.ending = [100]
    seen = stage.only()
    assert (seen.state, seen.reason, seen.kind) == ("draining", "was cancelled", None)
    stage.slurm.ending = []
    seen = stage.only()
    assert (seen.state, seen.reason, seen.kind) == ("gone", "was cancelled", None)


def test_orders_of_an_older_term_are_refused(stage: Stage) -> None:
    stage.deployer.start(make_order(term=5))
    for give in (
        lambda: stage.deployer.start(make_order("b", term=4)),
        lambda: stage.deployer.drain("100", 4),
        lambda: stage.deployer.stop("100", 4),
    ):
        with pytest.raises(DeployError, match="term 4") as caught:
            give()
        assert caught.value.kind == "superseded"
    assert stage.slurm.calls("scancel") == []
    assert len(stage.slurm.calls("sbatch")) == 1
    stage.deployer.start(make_order("b", fleet="another", term=1))
    stage.deployer.stop("100", 6)
    with pytest.raises(DeployError):
        stage.deployer.start(make_order("c", term=5))


def test_stopping_cancels_once_and_waits_for_the_processes(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.run("100")
    stage.deployer.stop("100", 1)
    stage.slurm.ending = [100]  # it is called cancelled, and still ends
    assert (stage.only().state, stage.only().reason) == ("draining", "is being stopped")
    stage.deployer.stop("100", 1)
    assert stage.slurm.calls("scancel") == [("scancel", "100")]
    stage.slurm.ending = []
    assert stage.only().state == "gone"
    stage.deployer.stop("100", 1)
    stage.deployer.stop("4711", 1)
    assert len(stage.slurm.calls("scancel")) == 1


def test_draining_what_waits_cancels_it(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.deployer.drain("100", 1)
    assert stage.slurm.calls("scancel") == [("scancel", "100")]
    assert (stage.only().state, stage.only().reason) == ("gone", "was stopped")


def test_secrets_go_by_file_and_go_away(stage: Stage, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hush", "utf-8")
    stage.deployer.start(make_order(secrets=[("TOKEN", str(token))]))
    copy = stage.home() / "secrets" / "n0.TOKEN"
    assert copy.read_text("utf-8") == "hush"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(stage.home().stat().st_mode) == 0o700
    for path in stage.home().iterdir():
        assert path.is_dir() or b"hush" not in path.read_bytes()
    stage.slurm.set_state("100", job_state="CANCELLED", end_time=int(NOW_S))
    stage.only()
    assert not copy.parent.exists()


def test_a_secret_that_is_not_there_submits_nothing(stage: Stage) -> None:
    with pytest.raises(DeployError, match="cannot read the secret") as caught:
        stage.deployer.start(make_order(secrets=[("TOKEN", "/no/such/file")]))
    assert caught.value.kind == "settings"
    assert stage.slurm.calls("sbatch") == []


def test_refusals_have_a_kind_and_leave_nothing(stage: Stage) -> None:
    stage.slurm.refusal = (
        "sbatch: error: Batch job submission failed: "
        "Invalid account or account/partition combination specified\n"
    )
    with pytest.raises(DeployError, match="Invalid account") as caught:
        stage.deployer.start(make_order())
    assert caught.value.kind == "settings"
    assert "\n" not in str(caught.value)
    assert not (stage.home() / "secrets").exists()
    assert stage.deployer.list("f") == ()
    stage.slurm.refusal = ""
    assert stage.deployer.start(make_order()).state == "starting"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partitions": ["nope"]}, "unknown partition"),
        ({"partitions": ["members"], "account": "nope"}, "does not allow the account"),
    ],
)
def test_wrong_settings_are_found_before_submitting(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    stage = Stage(tmp_path, **fields)
    with pytest.raises(DeployError, match=words) as caught:
        stage.deployer.start(make_order())
    assert caught.value.kind == "settings"
    assert stage.slurm.calls("sbatch") == []


def test_what_will_not_become_ready_has_failed(stage: Stage) -> None:
    stage.deployer.start(make_order(ready_s=100))
    stage.slurm.set_state("100", state_reason="AssocGrpGRES")
    assert (stage.only().state, stage.only().kind) == ("failed", "quota")
    stage.slurm.set_state("100", state_reason="Priority")
    assert stage.only().state == "starting"
    stage.now_s += 101
    assert (stage.only().state, stage.only().kind) == ("failed", "capacity")
    stage.run("100")
    late = stage.only()
    assert (late.state, late.kind) == ("failed", "settings")
    assert "n0 not ready after 100 s" in late.reason


def test_a_command_that_ended_is_seen_while_the_job_still_runs(stage: Stage) -> None:
    stage.deployer.start(make_order(kinds=["L4:1", "T4:2"]))
    stage.run("100")
    stage.say("n0", "ready")
    stage.say("n1", "ended 127")
    status = stage.only()
    assert (status.state, status.kind) == ("failed", "image")
    assert "n1" in status.reason


def test_a_heterogeneous_job_is_one_instance_and_waits_with_its_last_part(stage: Stage) -> None:
    stage.deployer.start(make_order(kinds=["L4:1", "T4:2"]))
    assert len(stage.slurm.rows) == 2
    stage.slurm.rows[0].update(job_state="RUNNING", nodes="n1")
    assert stage.only().state == "starting"
    stage.slurm.rows[1].update(job_state="RUNNING", nodes="n2")
    stage.say("n0", "ready")
    stage.say("n1", "ready")
    assert (stage.only().state, stage.only().hosts) == ("ready", ("n1", "n2"))


def test_the_accounting_is_asked_for_what_the_queue_forgot(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.slurm.forget()
    stage.slurm.accounts = SlurmAnswer(0, "OUT_OF_MEMORY|0:125|00:01:00\n", "")
    assert (stage.only().state, stage.only().kind) == ("failed", "memory")
    assert len(stage.slurm.calls("sacct")) == 1
    stage.deployer.stop("100", 1)
    assert stage.only().state == "gone"


def test_what_the_queue_lacks_is_not_gone_before_a_stated_time(
    stage: Stage, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("hush", "utf-8")
    stage.deployer.start(make_order(secrets=[("TOKEN", str(token))]))
    stage.run("100")
    stage.say("n0", "ready")
    rows = list(stage.slurm.rows)
    stage.slurm.forget()
    assert stage.only().state == "ready"
    stage.now_s += stage.settings.missing_s - 1
    missed = stage.only()
    assert (missed.state, missed.reason) == ("ready", "Slurm's queue has not listed it for 59 s")
    assert stage.deployer.start(make_order()).state == "ready"
    assert (stage.home() / "secrets" / "n0.TOKEN").exists()
    # It is back; what was missed before does not count.
    stage.slurm.rows += rows
    assert stage.only().state == "ready"
    stage.now_s += 2
    stage.slurm.forget()
    assert stage.only().state == "ready"
    stage.now_s += stage.settings.missing_s
    assert (stage.only().state, stage.only().kind) == ("gone", "ended")
    assert not (stage.home() / "secrets").exists()


def test_what_the_queue_lacks_is_gone_at_once_where_its_nodes_say_so(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.run("100")
    stage.say("n0", "ready")
    stage.say("n0", "ended 1")
    stage.slurm.forget()
    assert stage.only().state == "failed"


def test_what_the_queue_lacks_is_cancelled_when_it_is_stopped(stage: Stage) -> None:
    stage.deployer.start(make_order())
    stage.slurm.forget()
    stage.deployer.stop("100", 1)
    assert stage.slurm.calls("scancel") == [("scancel", "100")]
    assert stage.only().state == "draining"
    stage.now_s += stage.settings.missing_s
    assert (stage.only().state, stage.only().reason) == ("gone", "was stopped")


def test_an_answer_with_errors_says_nothing_of_jobs(stage: Stage) -> None:
    """As squeue of Slurm 22.05 ends, with code 0, while slurmctld is silent."""
    stage.deployer.start(make_order())
    stage.run("100")
    stage.slurm.errors = [{"description": "slurm_load_jobs", "error_number": 1803, "error": ""}]
    with pytest.raises(DeployError, match="squeue --json failed: slurm_load_jobs") as caught:
        stage.deployer.list("f")
    assert caught.value.kind == "unreachable"
    stage.slurm.errors = []
    assert stage.only().state == "starting"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        # Nodes with eight CPUs for two L4 and for four T4.
        ({}, ["--cpus-per-task=4", "--cpus-per-task=4"]),
        ({"cpus_per_gpu": 1}, ["--cpus-per-task=1", "--cpus-per-task=2"]),
        ({"cpus_per_gpu": 0}, []),
        ({"options": ["--cpus-per-gpu=3"]}, []),
        ({"options": ["--exclusive"]}, []),
    ],
)
def test_cpus_are_asked_for(tmp_path: Path, fields: dict[str, object], asked: list[str]) -> None:
    text = Stage(tmp_path / "work", **fields).deployer.dry_run(make_order(kinds=["L4:1", "T4:2"]))
    found = re.findall(r"^#SBATCH (--cpus-per-task=\d+)$", text, re.MULTILINE)
    assert found == asked
    assert re.findall(r"^srun .*?(--cpus-per-task=\d+)", text, re.MULTILINE) == asked


def test_a_cluster_is_one_region(tmp_path: Path) -> None:
    settings = SlurmTarget.parse({"work_folder": str(tmp_path)})
    offers = [Offer(region=name, node_type="L4:1", available=1, usd_per_hour=0.0) for name in "ab"]
    with pytest.raises(DeployError, match="one region, and the pool has a, b"):
        settings.open(TargetSite(tmp_path, offers))
    assert settings.open(TargetSite(tmp_path, offers[:1])).name == "slurm"


def test_a_dry_run_submits_and_writes_nothing(stage: Stage) -> None:
    text = stage.deployer.dry_run(make_order(kinds=["L4:1", "T4:2"]))
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert "#SBATCH hetjob" in text
    assert stage.slurm.calls("sbatch") == []
    assert not Path(stage.settings.work_folder).exists()


def test_logs_are_the_last_lines_of_every_node(stage: Stage) -> None:
    stage.deployer.start(make_order(kinds=["L4:1", "T4:2"]))
    (stage.home() / "n0.log").write_text("a\nb\nc\n", "utf-8")
    (stage.home() / "n1.log").write_bytes(b"x" * 10_000_000 + b"\nd\xff\n")
    assert stage.deployer.logs("100", 2).split("\n")[:2] == ["n0: b", "n0: c"]
    assert stage.deployer.logs("100", 1).split("\n")[1] == "n1: d\ufffd"
    with pytest.raises(DeployError, match="no job 4711"):
        stage.deployer.logs("4711")


def test_a_command_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    runner = ProcessRunner({"PATH": str(tmp_path)})
    with pytest.raises(DeployError, match="cannot run squeue") as caught:
        runner.run(["squeue", "--json"], deadline_s=5)
    assert caught.value.kind == "settings"


def test_commands_end_at_their_deadline_and_say_only_so_much() -> None:
    runner = ProcessRunner()
    late = runner.run([sys.executable, "-c", "import time; time.sleep(600)"], deadline_s=0.2)
    assert late.timed_out
    said = runner.run(
        [
            sys.executable,
            "-c",
            "import sys; print('out'); sys.stderr.write('x' * 10**6); sys.exit(3)",
        ],
        deadline_s=60,
    )
    assert (said.code, said.out, said.timed_out) == (3, "out\n", False)
    assert len(said.err) <= 2**16


def test_a_users_defaults_do_not_reach_slurms_commands() -> None:
    runner = ProcessRunner({"SBATCH_ACCOUNT": "x", "SQUEUE_FORMAT": "y", "SLURM_CONF": "z"})
    said = runner.run(["/usr/bin/env"], deadline_s=60)
    assert sorted(said.out.split()) == ["LC_ALL=C", "SLURM_CONF=z"]
