"""Files of ``shardwise launch``: shells and YAML parse, Kubernetes' schemas accept them, hostile names stay words.

Schemas of the custom resources are those of `tests/kubernetes`; pods and jobs are checked against Kubernetes'
own. An API server has more rules (CEL), and none ran.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.launch.engines.known_engines import ENGINES
from shardwise.launch.engines.launch_request import job_name
from shardwise.launch.engines.render import pod_value, sbatch_value, unfit_for_sbatch, yaml_block
from shardwise.launch.engines.torchrun import torchrun_line
from tests.golden.test_launch_files import FOLDER, OPTIONS, files, request

SCHEMAS = Path(__file__).parents[1] / "kubernetes"
KINDS = {"TrainJob": "trainjob-v1alpha1", "JobSet": "jobset-v1alpha2"}
MANIFESTS = [name for name in files() if name.endswith(".kubernetes.yaml")]
HOSTILE = "a b'c\"d\n$(touch pwned)`touch pwned`;{{ x }}: #é\\.toml"


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod that a job makes: of a TrainJob, what it adds to its runtime's."""
    if job["kind"] == "JobSet":
        return job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    trainer = job["spec"]["trainer"]
    patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    spec = patch["template"]["spec"]["template"]["spec"]
    container = {"image": trainer["image"], "command": trainer["command"], "env": trainer["env"]}
    container["resources"] = trainer["resourcesPerNode"]
    return {**spec, "containers": [{**spec["containers"][0], **container}]}


def check(manifests: list[dict[str, Any]]) -> None:
    """Validate a config map and a job, and the pod and the job in it."""
    validate = pytest.importorskip("kubernetes_validate").validate
    config, job = manifests
    validate(config, "1.34", strict=True)
    schema = json.loads((SCHEMAS / f"{KINDS[job['kind']]}.json").read_text())
    pytest.importorskip("jsonschema").validate(job, schema)
    version = KINDS[job["kind"]].split("-")[1]
    assert job["apiVersion"].endswith(f"/{version}")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod_of(job)}
    validate(pod, "1.34", strict=True)
    if job["kind"] == "JobSet":
        spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}, "1.34", strict=True
        )


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts_the_manifests(name: str) -> None:
    check(documents(files()[name]))


@pytest.mark.parametrize("name", ["kubernetes-2.kubernetes.yaml", "jobset-2.kubernetes.yaml"])
@pytest.mark.parametrize(("old", "new"), [("nodes", 2), ("numNodes: 2", "numNodes: two"), ("mountPath", "path")])
def test_a_wrong_manifest_is_refused(name: str, old: str, new: str) -> None:
    if old == "nodes":  # a field that does not exist
        manifests = documents(files()[name])
        manifests[1]["spec"]["nodes"] = 2
    else:
        text = files()[name].replace("parallelism: 2", "parallelism: two").replace(old, new)
        manifests = documents(text)
    with pytest.raises(Exception, match=r"nodes|two|path"):
        check(manifests)


def test_mounts_have_volumes() -> None:
    for name in MANIFESTS:
        pod = pod_of(documents(files()[name])[1])
        assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        memory = next(one for one in pod["volumes"] if one["name"] == "shared-memory")
        assert memory["emptyDir"] == {"medium": "Memory"}


def test_a_shell_reads_each_script() -> None:
    scripts = [str(FOLDER / name) for name in files() if name.endswith((".sbatch", ".sh"))]
    each = ["bash", "-c", 'for file; do bash -n "$file"; done', "", *scripts]
    done = subprocess.run(each, capture_output=True, text=True)
    assert scripts
    assert not done.stderr


def test_sbatch_lines_come_before_the_first_command() -> None:
    """Slurm ignores those that follow one."""
    for name, text in files().items():
        if name.endswith(".sbatch"):
            head, _, rest = text.partition("\n\n")
            assert all(line.startswith("#") for line in head.splitlines())
            assert "#SBATCH" not in rest


def hostile(engine: str, **more: Any) -> Any:
    folder = OPTIONS[engine].get("storage_path") or f"/home/{HOSTILE}"
    facts = {"config_file": f"{folder}/{HOSTILE}", "train_words": (f"train.output={HOSTILE}",), "folder": folder}
    return request(engine, **facts, name=job_name(HOSTILE), **more)


def words_of(script: str, folder: Path, marker: str, env: dict[str, str] | None = None) -> list[str]:
    """What a script starts: each ``python`` and ``srun`` in it prints its words, a NUL behind each."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("python", "srun", "scontrol"):
        (tools / tool).write_text(
            f'#!/bin/sh\n[ {tool} = {marker} ] && printf "%s\\0" "$@" "GREETING=$GREETING"\nexit 0\n'
        )
        (tools / tool).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", **(env or {})}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert sorted(file.name for file in folder.iterdir()) == ["bin"], "a name was run as a command"
    return done.stdout.split("\0")


@pytest.mark.parametrize("engine", [*ENGINES])
def test_a_hostile_name_stays_a_word(engine: str, tmp_path: Path) -> None:
    header = f"Made from {json.dumps(HOSTILE)}."
    made = hostile(
        engine, env={"GREETING": HOSTILE}, python="python", output="/tmp/none/a b;$(touch pwned)`touch pwned`"
    )
    text = ENGINES[engine].render(made, HOSTILE, header)
    if engine == "slurm":
        script = text.replace(f"cd {shlex.quote(made.folder)} || exit 1", "")
        env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4", "SLURM_RESTART_COUNT": "1"}
        found = words_of(script, tmp_path, "srun", env)
    elif engine == "torchrun":
        line = torchrun_line(made, 0)
        found = words_of(line.replace(f"cd {shlex.quote(made.folder)} && ", ""), tmp_path, "python")
        assert shlex.split(line)[1] == made.folder
    elif engine == "skypilot":
        task = yaml.safe_load(text)
        assert set(task) == {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
        found = words_of(task["run"].replace("cd /storage || exit 1", ""), tmp_path, "python")
    else:
        found = documents(text)[1]["spec"]["trainer"]["command"]
        variables = documents(text)[1]["spec"]["trainer"]["env"]
        found += [f"GREETING={one['value']}" for one in variables if one["name"] == "GREETING"]
        found = [word.replace("$$", "$") for word in found]  # as Kubernetes does
    assert made.config_file in found
    assert f"GREETING={HOSTILE}" in found
    assert made.train_words[0] in found


@pytest.mark.parametrize(
    ("word", "written"),
    [("$(HOME)", "$$(HOME)"), ("a$b", "a$b"), ("$$", "$$$"), ("$", "$"), ("$$(A)", "$$$$(A)"), ('"\n', '"\n')],
)
def test_kubernetes_replaces_nothing_in_a_word(word: str, written: str) -> None:
    assert json.loads(pod_value(word)) == written


@pytest.mark.parametrize(
    "text", ["a\n", "a: [\n# b\n\n  c\n", "a", "", "\ta\n", " a\n", "a\n\n", "a\r\n", "a\x85b\n", "é\n", "---\n...\n"]
)
def test_a_block_is_its_text(text: str) -> None:
    assert yaml.safe_load(f"key: {yaml_block(text, 2)}\nlast: 1\n") == {"key": text, "last": 1}


def test_values_of_sbatch() -> None:
    assert sbatch_value("/a/b-%j.log") == "/a/b-%j.log"
    assert sbatch_value("/a b/c") == '"/a b/c"'
    assert unfit_for_sbatch("/a b") is None
    assert all(unfit_for_sbatch(text) for text in ('a"b', "a'b", "a\nb", "a\\b", "a\tb"))


@pytest.mark.parametrize(
    ("text", "name"), [("My Run.v2", "my-run-v2"), ("8b", "run-8b"), ("", "run"), ("é", "run"), ("a" * 99, "a" * 40)]
)
def test_a_name_that_engines_take(text: str, name: str) -> None:
    assert job_name(text) == name
