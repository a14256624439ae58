"""What squeue says, in the words of a real one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.deploy.labels import Labels
from atoll.deploy.slurm.reasons import explain_end, explain_refusal, explain_waiting
from atoll.deploy.slurm.slurm_jobs import (
    JobComment,
    expand_hosts,
    read_comment,
    read_jobs,
    write_comment,
)
from atoll.deploy.target import DeployError
from tests.deploy.slurm.builders import read_data

LABELS = Labels(fleet="f", instance="i", plan="p", placement="l", service="s", role="m/llm/both")


def test_a_real_queue_is_read() -> None:
    jobs = {
        job.comment.labels.instance + "+" * job.offset: job
        for job in read_jobs(read_data("squeue-22.05.json"))
        if job.comment is not None
    }
    assert jobs["het"].leader == jobs["het+"].leader == jobs["het"].id
    assert jobs["het"].hosts == ("n1",)
    assert jobs["het+"].gres == ("gpu:t4:2(IDX:1-2)",)
    assert jobs["running"].limit_minutes is None
    assert jobs["walltime"].limit_minutes == 2
    assert jobs["walltime"].end_s == 1794796445
    assert jobs["failed"].exit_code == 3
    assert jobs["noprogram"].exit_code == 127
    assert jobs["pending"].reason == "Resources"
    assert jobs["toolong"].reason == "PartitionTimeLimit"
    assert jobs["cancelled"].states == {"CANCELLED"}


def test_the_shape_of_later_versions_is_read() -> None:
    number = {"set": True, "infinite": False, "number": 5}
    row = {
        "job_id": 7,
        "het_job_id": {"set": True, "infinite": False, "number": 0},
        "het_job_offset": {"set": True, "infinite": False, "number": 0},
        "comment": write_comment(JobComment(ready_s=1, labels=LABELS)),
        "job_state": ["RUNNING", "COMPLETING"],
        "state_reason": "None",
        "exit_code": {
            "status": ["SIGNALED"],
            "return_code": {"set": False, "infinite": False, "number": 0},
            "signal": {"id": {"set": True, "infinite": False, "number": 9}, "name": "KILL"},
        },
        "start_time": number,
        "end_time": number,
        "time_limit": {"set": True, "infinite": True, "number": 0},
        "nodes": "n[1-2]",
        "gres_detail": ["gpu:l4:1(IDX:0)", "gpu:l4:1(IDX:1)"],
    }
    (job,) = read_jobs(json.dumps({"jobs": [row]}))
    assert job.leader == 7
    assert job.states == {"RUNNING", "COMPLETING"}
    assert (job.exit_code, job.signal) == (None, 9)
    assert job.limit_minutes is None
    assert job.start_s == 5


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", "[]", '{"jobs": 3}', "[" * 100_000])
def test_what_is_no_queue_is_refused(text: str) -> None:
    with pytest.raises(DeployError) as caught:
        read_jobs(text)
    assert caught.value.kind == "unreachable"


@given(
    st.builds(
        Labels,
        **dict.fromkeys(["fleet", "instance", "plan"], st.text(max_size=20)),
        placement=st.just("l"),
        service=st.text(max_size=20),
        role=st.just("r"),
        term=st.integers(0),
    )
)
def test_labels_survive_a_comment(labels: Labels) -> None:
    comment = JobComment(ready_s=1.5, labels=labels)
    text = write_comment(comment)
    assert text.isascii()
    assert text.isprintable()
    assert "'" not in text
    assert read_comment(text) == comment


def test_labels_that_slurm_would_not_take_are_refused() -> None:
    with pytest.raises(DeployError, match="comment holds 1024") as caught:
        write_comment(JobComment(ready_s=1, labels=LABELS.model_copy(update={"plan": "x" * 1024})))
    assert caught.value.kind == "settings"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n[1-3,07],gpu-a", ("n1", "n2", "n3", "n07", "gpu-a")),
        ("r[1-2]n[08-09]x", ("r1n08x", "r1n09x", "r2n08x", "r2n09x")),
    ],
)
def test_hosts_are_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@given(st.text(alphabet="n0189[]-,", max_size=24))
def test_no_list_of_hosts_is_too_much(text: str) -> None:
    assert len(expand_hosts(text)) <= 100_000


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("Resources", None),
        ("Priority", None),
        ("PartitionTimeLimit", "settings"),
        ("AccountNotAllowed", "settings"),
        ("AssocGrpGRES", "quota"),
        ("QOSMaxGRESPerUser", "quota"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "capacity"),
        ("SomethingNew", None),
    ],
)
def test_reasons_to_wait(reason: str, kind: str | None) -> None:
    told = explain_waiting(reason)
    assert told.kind == kind
    assert reason.split(",", maxsplit=1)[0] in told.line


@pytest.mark.parametrize(
    ("state", "code", "kind"),
    [
        ("TIMEOUT", 0, None),
        ("OUT_OF_MEMORY", 0, "memory"),
        ("PREEMPTED", 0, "capacity"),
        ("FAILED", 127, "image"),
        ("FAILED", 3, "ended"),
    ],
)
def test_ends(state: str, code: int, kind: str | None) -> None:
    assert explain_end(state, "None", code, None).kind == kind


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            (
                "sbatch: error: invalid partition specified: nope\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
            ),
            "settings",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: "
                "Invalid account or account/partition combination specified\n"
            ),
            "settings",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
            "capacity",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: "
                "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
            ),
            "quota",
        ),
        ("squeue: error: Unable to contact slurm controller (connect failure)\n", "unreachable"),
        ("", "settings"),
    ],
)
def test_refusals_are_one_line(said: str, kind: str) -> None:
    told = explain_refusal(said)
    assert told.kind == kind
    assert "\n" not in told.line
    assert not told.line.startswith(("sbatch", "squeue"))
