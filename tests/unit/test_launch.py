"""``shardwise launch``: what it refuses before anything is planned, what it renders, and nodes over ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.errors import MachineError, RankError, UserError
from shardwise.launch.engines.torchrun import run_over_ssh, torchrun_words
from tests.cli.configs import write_config
from tests.golden.test_launch_files import request

CPU = {"device": "cpu", "nproc": None}
K8S = ("--image", "i", "--storage-claim", "c")


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that submits has no GPU, as a login node."""
    monkeypatch.setattr("shardwise.hardware.cluster._nvml_devices", list)


def launch(folder: Path, *words: str, **changes: dict[str, Any]) -> Result:
    """``shardwise launch`` of the small config, in this process."""
    config = write_config(folder, **{"parallel": CPU, **changes})
    return CliRunner().invoke(app, ["launch", str(config), "-o", str(folder / "file"), *words])


def problems(folder: Path, *words: str, **changes: dict[str, Any]) -> list[str]:
    """What a command is refused for; nothing is written."""
    result = launch(folder, *words, **changes)
    assert isinstance(result.exception, UserError), (result.exception, result.output)
    assert result.exception.exit_code == 2
    assert not (folder / "file").exists()
    return list(result.exception.problems)


SLURM = ("--via", "slurm", "--dry-run", "--nproc", "2")
REFUSALS: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
    ("no engine", (), {}, "--via is missing: name the engine, torchrun, slurm, kubernetes or skypilot"),
    ("engine", ("--via", "slrum"), {}, "--via 'slrum' must be torchrun, slurm, kubernetes or skypilot (did you mean"),
    (
        "option of another engine",
        ("--via", "kubernetes", "--dry-run", *K8S, "--partition", "gpu", "parallel.nproc=2"),
        {"train": {"output": "runs/a"}},
        "--partition belongs to --via slurm, and this is kubernetes; remove it",
    ),
    ("flag of another engine", (*SLURM, "--spot"), {}, "--spot belongs to --via skypilot, and this is slurm"),
    ("empty option", (*SLURM, "--partition", ""), {}, "--partition is empty; give a value"),
    (
        "world size that does not divide",
        (*SLURM, "--nodes", "2", "--strategy", "fsdp+pp3"),
        {},
        "parallel.strategy = fsdp+pp3 needs a multiple of 3 ranks, and --nodes 2 × --nproc 2 = 4 ranks; use --nodes 3 "
        "or 6 with this --nproc, or degrees whose product divides 4",
    ),
    (
        "tensor parallel over nodes",
        (*SLURM, "--nodes", "2", "--strategy", "ddp+tp4"),
        {},
        "tp 4 must divide the 2 ranks of a node, as its groups stay inside one; use tp 1 or 2, or an --nproc that is a",
    ),
    (
        "global batch that does not divide",
        (*SLURM, "--nodes", "2", "train.global_batch=6"),
        {},
        "global_batch",
    ),
    ("fewest nodes", (*SLURM, "launch.min_nodes=3"), {}, "launch.min_nodes = 3, and --nodes is 1; use --nodes 3"),
    ("most nodes", (*SLURM, "--nodes", "3", "launch.max_nodes=2"), {}, "launch.max_nodes = 2, and --nodes is 3"),
    (
        "nodes that a scheduler does not add",
        (*SLURM, "launch.max_nodes=2"),
        {},
        "launch.max_nodes = 2, and slurm gives the run --nodes 1; use --nodes 2",
    ),
    ("fewest above most", (*SLURM, "launch.min_nodes=3", "launch.max_nodes=2"), {}, "'min_nodes' is 3"),
    (
        "fewer nodes than a group",
        (*SLURM, "--nodes", "2", "--strategy", "fsdp+pp4", "launch.min_nodes=1"),
        {},
        "needs a multiple of 4 ranks, which 1 nodes × 2 are not, and launch.min_nodes and max_nodes allow 1 to 2",
    ),
    (
        "elastic TrainJob",
        ("--via", "kubernetes", "--dry-run", *K8S, "--nodes", "2", "--nproc", "1", "launch.min_nodes=1"),
        {"train": {"output": "runs/a"}},
        "a TrainJob has a fixed number; use --kind jobset",
    ),
    (
        "output on a pod's disk",
        ("--via", "kubernetes", "--dry-run", *K8S, "--nproc", "1"),
        {},
        "is on a machine's own disk, which is lost with it and which others do not see; put it below --storage-path",
    ),
    (
        "no image",
        ("--via", "kubernetes", "--dry-run", "--storage-claim", "c", "--nproc", "1"),
        {},
        "--image is missing",
    ),
    (
        "no claim",
        ("--via", "kubernetes", "--dry-run", "--image", "i", "--nproc", "1"),
        {},
        "--storage-claim is missing",
    ),
    (
        "kind",
        ("--via", "kubernetes", "--dry-run", *K8S, "--kind", "job", "--nproc", "1"),
        {},
        "must be one of trainjob",
    ),
    ("no bucket", ("--via", "skypilot", "--dry-run", "--nproc", "1"), {}, "--volume or --bucket is missing"),
    (
        "elastic SkyPilot",
        ("--via", "skypilot", "--dry-run", "--bucket", "s3://b", "--nodes", "2", "--nproc", "1", "launch.min_nodes=1"),
        {"train": {"output": "runs/a"}},
        "SkyPilot replaces a lost machine before it goes on",
    ),
    ("GPU and CPU", (*SLURM, "--gpu", "H100-SXM"), {}, "--gpu H100-SXM, and parallel.device is cpu; leave one"),
    ("unknown GPU", (*SLURM, "--gpu", "H1000"), {"parallel": {"nproc": None}}, "H1000"),
    (
        "device that nobody knows",
        SLURM,
        {"parallel": {"nproc": None}},
        "the device of the machines is not known, as this one has no GPU; give --gpu NAME",
    ),
    (
        "number that nobody knows",
        ("--via", "slurm", "--dry-run"),
        {"parallel": {"nproc": None, "device": "cuda"}},
        "--nproc is missing: the number of GPUs of a machine is not known",
    ),
    (
        "what sbatch takes from elsewhere",
        (*SLURM, "--sbatch-option", "nodes=3"),
        {},
        "--sbatch-option 'nodes=3': the script sets nodes itself; use --nodes",
    ),
    ("what the script needs", (*SLURM, "--sbatch-option", "array=1-3"), {}, "sets array itself; leave it out"),
    ("nodes that may be lost", (*SLURM, "--sbatch-option", "no-kill"), {}, "no-kill itself; use launch.min_nodes"),
    ("what sbatch has not", (*SLURM, "--sbatch-option", "M em=3"), {}, "must be KEY or KEY=VALUE"),
    ("what no line holds", (*SLURM, "--sbatch-option", 'comment=a"b'), {}, "no way to write a quote or a backslash"),
    ("partition in two lines", (*SLURM, "--partition", "a\n#SBATCH -A b"), {}, "ends at a line break"),
    (
        "hosts",
        ("--via", "torchrun", "--dry-run", "--nodes", "3", "--nproc", "1", "--hosts", "a,b"),
        {},
        "--hosts names 2 (a, b), and --nodes is 3",
    ),
    (
        "a host twice",
        ("--via", "torchrun", "--dry-run", "--nodes", "2", "--nproc", "1", "--hosts", "a,a"),
        {},
        "names a host twice",
    ),
    (
        "a host that is an option of ssh",
        ("--via", "torchrun", "--dry-run", "--nproc", "1", "--hosts", "-oProxyCommand=x"),
        {},
        "is not a host name",
    ),
    (
        "restarts that a runtime decides",
        ("--via", "kubernetes", "--dry-run", *K8S, "--nproc", "1", "--restarts", "3"),
        {"train": {"output": "runs/a"}},
        "--restarts 3 does nothing with --kind trainjob; remove it",
    ),
    (
        "volume and bucket",
        ("--via", "skypilot", "--dry-run", "--nproc", "1", "--bucket", "s3://b", "--volume", "v"),
        {"train": {"output": "runs/a"}},
        "--volume and --bucket are both given",
    ),
    ("variable", (*SLURM, "--env", "NCCL DEBUG=INFO"), {}, "--env 'NCCL DEBUG=INFO' must be NAME=VALUE"),
    ("variable twice", (*SLURM, "--env", "A=1", "--env", "A=2"), {}, "--env A is given 2 times; give it once"),
    (
        "what sbatch takes once",
        (*SLURM, "--sbatch-option", "mem=0", "--sbatch-option", "mem=1"),
        {},
        "--sbatch-option 'mem=1': mem is given twice; give it once",
    ),
    ("endpoint", ("--via", "torchrun", "--dry-run", "--nproc", "1", "--endpoint", "a"), {}, "must be HOST:PORT"),
    ("interface", (*SLURM, "--interface", "eth 0"), {}, "is not the name of an interface"),
    ("config", (*SLURM, "train.stepz=3"), {}, "train.stepz: no such key"),
    ("plan", (*SLURM, "--plan", "none.toml"), {}, "none.toml"),
]


@pytest.mark.parametrize(("words", "changes", "says"), [case[1:] for case in REFUSALS], ids=[c[0] for c in REFUSALS])
def test_a_mistake_is_one_message(tmp_path: Path, words: tuple[str, ...], changes: dict[str, Any], says: str) -> None:
    found = problems(tmp_path, *words, **changes)
    assert sum(says in problem for problem in found) == 1, found


def test_a_missing_client_is_said_and_a_dry_run_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for via, client in (("slurm", "sbatch"), ("kubernetes", "kubectl"), ("skypilot", "sky")):
        more = {"slurm": (), "kubernetes": K8S, "skypilot": ("--bucket", "s3://b")}[via]
        words = ("--via", via, "--nproc", "1", "train.output=runs/a", *more)
        assert problems(tmp_path, *words) == [
            f"{client} is not installed here, and it starts the run; install it, or add --dry-run"
        ]
    found = problems(tmp_path, "--via", "torchrun", "--nproc", "1", "--hosts", "a")
    assert found == ["ssh is not installed here, and it starts the run; install it, or add --dry-run"]


def test_all_problems_at_once(tmp_path: Path) -> None:
    words = ("--via", "kubernetes", "--partition", "p", "--dry-run", "--nproc", "2", "--strategy", "ddp+tp3")
    found = problems(tmp_path, *words)
    assert [one.split(" ")[0] for one in found] == [
        "--partition", "parallel.strategy", "train.output", "--image", "--storage-claim",
    ]  # fmt: skip


def test_a_plan_of_another_world(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    made = CliRunner().invoke(
        app, ["plan", "llama-3.1-8b", "--cluster", "8xA100-80GB", "--seq-len", "128", "-o", str(plan)]
    )
    assert made.exit_code == 0, made.output
    more = {"parallel": {"nproc": None}}
    words = ("--via", "slurm", "--dry-run", "--plan", str(plan), "--gpu", "A100-80GB")
    (found,) = problems(tmp_path, *words, "--nodes", "3", **more)
    assert "is for 8 ranks, which --nodes 3 cannot share evenly; use --nodes 1, 2, 4 or 8" in found
    (found,) = problems(tmp_path, *words, "--nodes", "2", "--nproc", "8", **more)
    assert "is for 8 ranks, and --nodes 2 × --nproc 8 = 16 ranks; make the product 8, or make a new plan" in found


def test_a_dry_run_writes_prints_and_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a dry run runs nothing"))
    env = ("--env", "NCCL_DEBUG=INFO", "--env", "OMP_NUM_THREADS=3")
    result = launch(tmp_path, *SLURM, "--nodes", "2", "--sbatch-option", "mem=0", "--json", *env)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "file").read_text()
    for line in ("#SBATCH --nodes=2", "#SBATCH --cpus-per-task=2", "#SBATCH --mem=0", "parallel.strategy=ddp"):
        assert line in text
        assert line in result.stderr
    assert "gpus" not in text
    assert [line for line in text.splitlines() if "NCCL_DEBUG" in line or "THREADS" in line] == [
        "export NCCL_DEBUG=INFO", "export OMP_NUM_THREADS=3",
    ]  # fmt: skip
    assert "plan: ddp on 4 × CPU" in result.stderr
    assert "must be on a file system that all nodes share" in result.stderr
    answer = json.loads(result.stdout)
    assert (answer["world_size"], answer["strategy"], answer["submitted"]) == (4, "ddp", None)


def test_the_type_of_a_gpu_may_be_unknown(tmp_path: Path) -> None:
    result = launch(tmp_path, *SLURM, "--nodes", "2", parallel={"device": "cuda", "nproc": None})
    assert result.exit_code == 0, result.output
    assert "on 4 × GPU of unknown type, unknown each" in result.output
    assert "#SBATCH --gpus-per-node=2" in (tmp_path / "file").read_text()


def test_data_that_is_on_the_machines_is_not_planned_for_here(tmp_path: Path) -> None:
    result = launch(
        tmp_path, "--via", "kubernetes", "--dry-run", *K8S, "--nproc", "2", data={"path": "corpus/of/the/claim"},
        train={"output": "runs/a"},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "plan: unknown here (" in result.output
    assert "the ranks plan when they start" in result.output
    assert "parallel.strategy=" not in (tmp_path / "file").read_text()


def client(folder: Path, name: str, script: str) -> None:
    """A program ``name`` in ``folder``."""
    (folder / name).write_text(f"#!{sys.executable}\n{script}")
    (folder / name).chmod(0o755)


def test_a_file_is_submitted_by_the_engines_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client(tmp_path, "sbatch", "import sys; print('4711'); open(sys.argv[-1] + '.seen', 'w').write(str(sys.argv[1:]))")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = launch(tmp_path, "--via", "slurm", "--nproc", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["submitted"] == "4711"
    assert f"output: tail -F {tmp_path}/run/slurm-4711.log" in result.stderr
    assert (tmp_path / "file.seen").read_text() == f"['--parsable', '{tmp_path / 'file'}']"


@pytest.mark.parametrize(
    ("via", "code", "answer", "says"),
    [
        ("slurm", 1, "sbatch: error: invalid partition", "ended with 1: sbatch: error: invalid partition"),
        (
            "kubernetes",
            1,
            'AlreadyExists: configmaps "a"',
            'configmaps "a"\ngive this one another --name, or delete that',
        ),
        ("slurm", 0, "17\nsbatch: warning: no account", "sbatch: warning: no account\nsubmitted: 17"),
        ("kubernetes", 0, "trainjob/a created", "kubectl logs -n n -f --prefix -l jobset.sigs.k8s.io/jobset-name=a"),
    ],
)
def test_what_the_client_answers_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, via: str, code: int, answer: str, says: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    said, _, warned = answer.partition("\nsbatch: ")
    answers = {"stdout": "", "stderr": answer} if code else {"stdout": said, "stderr": warned and f"sbatch: {warned}"}
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, code, **answers))
    more = (*K8S, "--namespace", "n", "train.output=runs/a") if via == "kubernetes" else ()
    result = launch(tmp_path, "--via", via, "--nproc", "1", *more)
    assert isinstance(result.exception, MachineError if code else type(None))
    assert says in f"{result.output}{result.exception}"


def test_torchrun_words() -> None:
    words = torchrun_words(
        request("torchrun", min_nodes=1, max_nodes=4, options={"hosts": ["u@a", "b"], "endpoint": None}), 1
    )
    assert "--nnodes=1:4" in words
    assert any(word.startswith("--rdzv-endpoint=a:") for word in words)
    assert "--rdzv-conf=is_host=false,join_timeout=900,read_timeout=900" in words
    alone = torchrun_words(request("torchrun", nodes=1), 0)
    assert "--standalone" in alone
    assert not [word for word in alone if "rdzv" in word]


SSH = """\
import json, os, select, signal, sys, time
host, line = sys.argv[-2:]
with open({log!r} + host, "w") as file:
    json.dump(sys.argv[1:], file)
print("hello from", host, flush=True)
if host == "bad":
    until = time.monotonic() + 30
    while not any(os.path.exists({log!r} + other) for other in ("long", "slow")) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    sys.exit(3)
if host == "slow":
    time.sleep(1.2)
    print("done", flush=True)
    sys.exit(0)
while True:  # runs until Ctrl-C comes over the terminal, or for ever
    key = os.read(0, 1) if select.select([0], [], [], 0.1)[0] else None
    if key == b"":  # nobody is there any more
        sys.exit(4)
    if key == b"\\x03" and host != "deaf":
        print("saved", flush=True)
        sys.exit(1)
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    client(tmp_path, "ssh", SSH.format(log=str(tmp_path / "started-")))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def over(hosts: list[str], **more: Any) -> Any:
    return request("torchrun", nodes=len(hosts), options={"hosts": hosts, "endpoint": None}, **more)


def test_the_first_node_that_fails_ends_all(ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="node bad failed first: torchrun ended with 3"):
        run_over_ssh(over(["long", "bad", "deaf"]), grace_s=1)
    lines = capfd.readouterr().out.splitlines()
    assert {"long | hello from long", "bad  | hello from bad", "long | saved"} <= set(lines)
    *options, host, line = json.loads((ssh / "started-bad").read_text())
    assert (options[0], host) == ("-tt", "bad")
    assert line.startswith("cd /home/ada && exec env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_nodes_save(ssh: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    from shardwise.errors import Interrupted

    def later() -> None:
        while not (ssh / "started-long").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    thread = threading.Thread(target=later)
    thread.start()
    try:
        with pytest.raises(Interrupted, match="the same command resumes"):
            run_over_ssh(over(["long"]))
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert "long | saved" in capfd.readouterr().out


def test_an_elastic_run_survives_a_node(ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_over_ssh(over(["bad", "slow"], min_nodes=1))
    assert "slow | done" in capfd.readouterr().out
