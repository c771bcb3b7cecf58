"""The files for Kueue, Volcano and Slurm fit the definitions, each other, and the exit codes; a broken copy of each is found out."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lockstep.exit_codes import DECIDED, SIGNALLED, ExitCode
from lockstep.spec.loading import load_spec
from tests.cluster.queue_systems import action, after_failure
from tests.unit.clusters.schemas import (
    CLUSTER,
    RESOURCES,
    ROOT,
    check_confined,
    check_custom_resource,
    check_image,
    documents,
    kind_of,
    literal_secrets,
)
from tests.unit.clusters.test_files import first_container, options, ray_spec

Document = dict[str, Any]
QUEUED = [path for path in RESOURCES if path.parent.name in ("kueue", "volcano")]
ENDS_A_JOB = DECIDED - SIGNALLED - {ExitCode.DONE}
"""After these codes another start would end in the same way."""
QUEUE, TOPOLOGY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/podset-required-topology"
PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"


def load(name: str) -> Document:
    (document,) = documents(CLUSTER / name)
    return document


def queues() -> Mapping[str, Document]:
    """What an administrator sets up, by kind."""
    parts = [*documents(CLUSTER / "kueue" / "queues.yaml"), *documents(CLUSTER / "volcano" / "queue.yaml")]
    return {part["kind"]: part for part in parts}


@pytest.mark.parametrize("path", QUEUED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_fits_its_definition_and_a_misspelt_one_does_not(path: Path) -> None:
    for document in documents(path):
        check_custom_resource(document)
        assert not list(literal_secrets(document))
        broken = copy.deepcopy(document)
        broken.get("spec", broken)["sped"] = True
        with pytest.raises(jsonschema.ValidationError):
            check_custom_resource(broken)


def check_kueue(document: Document) -> None:
    """What Kueue's webhooks ask of a Job or a RayJob, and whether queue, class and levels are those of `queues.yaml`."""
    around, labels = queues(), document["metadata"]["labels"]
    if labels[QUEUE] != around["LocalQueue"]["metadata"]["name"]:
        raise ValueError(f"no such queue: {labels[QUEUE]}")
    if labels["kueue.x-k8s.io/priority-class"] != around["WorkloadPriorityClass"]["metadata"]["name"]:
        raise ValueError("no such priority class")
    if document["spec"]["suspend"] is not True:
        raise ValueError("it would start before it is admitted")
    templates = [document["spec"]["template"]] if "template" in document["spec"] else []
    if not templates:
        cluster = document["spec"]["rayClusterSpec"]
        if not document["spec"].get("shutdownAfterJobFinishes") or cluster.get("enableInTreeAutoscaling"):
            raise ValueError("the cluster would outlive the job, or grow beyond what was admitted")
        templates = [group["template"] for group in cluster["workerGroupSpecs"]]
    levels = {level["nodeLabel"] for level in around["Topology"]["spec"]["levels"]}
    for template in templates:
        annotations = template["metadata"]["annotations"]
        wanted = [annotations[name] for name in (TOPOLOGY, PREFERRED) if name in annotations]
        if len(wanted) != 1 or wanted[0] not in levels:
            raise ValueError(f"not one level of the topology: {wanted}")
    if "podFailurePolicy" in document["spec"]:
        ends = {code for code in range(1, 256) if after_failure(document, code) == "FailJob"}
        if ends != ENDS_A_JOB or after_failure(document, 143, evicted=True) != "Ignore":
            raise ValueError(f"a Job ends with {sorted(ends)}")


@pytest.mark.parametrize("name", ["job.yaml", "rayjob.yaml"])
def test_a_job_for_kueue_is_admitted_as_a_whole_and_near_together(name: str) -> None:
    check_kueue(load(f"kueue/{name}"))


BROKEN_KUEUE: dict[str, tuple[str, Callable[[Document], object]]] = {
    "no such queue": ("job.yaml", lambda d: d["metadata"]["labels"].update({QUEUE: "train"})),
    "no such class": ("job.yaml", lambda d: d["metadata"]["labels"].update({"kueue.x-k8s.io/priority-class": "a"})),
    "not suspended": ("rayjob.yaml", lambda d: d["spec"].update(suspend=False)),
    "autoscaler": ("rayjob.yaml", lambda d: ray_spec(d).update(enableInTreeAutoscaling=True)),
    "cluster stays": ("rayjob.yaml", lambda d: d["spec"].update(shutdownAfterJobFinishes=False)),
    "no such level": ("job.yaml", lambda d: d["spec"]["template"]["metadata"]["annotations"].update({PREFERRED: "rack"})),
    "two levels": (
        "job.yaml",
        lambda d: d["spec"]["template"]["metadata"]["annotations"].update({TOPOLOGY: "kubernetes.io/hostname"}),
    ),
    "signals end it": (
        "job.yaml",
        lambda d: d["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"].append(143),
    ),
    "refusals do not": (
        "job.yaml",
        lambda d: d["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"].remove(2),
    ),
    "evictions count": ("job.yaml", lambda d: d["spec"]["podFailurePolicy"]["rules"].pop(0)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "breaks"), BROKEN_KUEUE.values(), ids=BROKEN_KUEUE)
def test_a_broken_job_for_kueue_is_found_out(name: str, breaks: Callable[[Document], object]) -> None:
    document = load(f"kueue/{name}")
    breaks(document)
    with pytest.raises((ValueError, KeyError)):
        check_kueue(document)


def test_the_queues_of_kueue_fit_together() -> None:
    around = queues()
    assert around["LocalQueue"]["spec"]["clusterQueue"] == around["ClusterQueue"]["metadata"]["name"]
    (group,) = around["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == around["ResourceFlavor"]["metadata"]["name"]
    assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
    assert around["ResourceFlavor"]["spec"]["topologyName"] == around["Topology"]["metadata"]["name"]
    (container,) = load("kueue/job.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"].keys() <= set(group["coveredResources"])


def check_volcano(job: Document) -> None:
    if (
        job["spec"]["schedulerName"] != "volcano"
        or job["spec"]["queue"] != queues()["Queue"]["metadata"]["name"]
    ):
        raise ValueError("another scheduler or queue")
    if job["spec"]["minAvailable"] != sum(task["replicas"] for task in job["spec"]["tasks"]):
        raise ValueError("part of it would start alone")
    if any(("event" in rule) == ("exitCode" in rule) for rule in job["spec"]["policies"]):
        raise ValueError("a rule is for an event or for a code")  # as Volcano's webhook says
    for code in range(1, 256):
        wanted = "AbortJob" if code in ENDS_A_JOB else "RestartJob"
        if action(job, "PodFailed", code) != wanted:
            raise ValueError(f"exit code {code}: {action(job, 'PodFailed', code)}")
    if action(job, "PodEvicted") != "RestartJob" or action(job, "TaskCompleted") != "CompleteJob":
        raise ValueError("an eviction or the end")


BROKEN_VOLCANO: dict[str, Callable[[Document], object]] = {
    "scheduler": lambda s: s.update(schedulerName="default-scheduler"),
    "queue": lambda s: s.update(queue="default"),
    "not as a whole": lambda s: s["tasks"][0].update(replicas=2),
    "any failure first": lambda s: s["policies"].insert(0, {"event": "PodFailed", "action": "RestartJob"}),
    "event and code": lambda s: s["policies"][1].update(event="PodFailed"),
    "aborted": lambda s: s["policies"][0].update(action="AbortJob"),
}


def test_a_job_for_volcano_starts_again_unless_it_has_failed_by_itself() -> None:
    check_volcano(load("volcano/job.yaml"))


@pytest.mark.parametrize("breaks", BROKEN_VOLCANO.values(), ids=BROKEN_VOLCANO)
def test_a_broken_job_for_volcano_is_found_out(breaks: Callable[[Document], object]) -> None:
    job = load("volcano/job.yaml")
    breaks(job["spec"])
    with pytest.raises(ValueError):
        check_volcano(job)


def test_a_rayjob_for_volcano_has_the_labels_that_kuberay_reads() -> None:
    """`ray-operator/controllers/ray/batchscheduler/volcano` hands them on to the PodGroup."""
    document = load("volcano/rayjob.yaml")
    labels = document["metadata"]["labels"]
    assert labels["volcano.sh/queue-name"] == queues()["Queue"]["metadata"]["name"]
    assert labels["volcano.sh/network-topology-mode"] in ("hard", "soft")
    assert int(labels["volcano.sh/network-topology-highest-tier-allowed"]) > 0
    assert document["spec"]["backoffLimit"] > 0
    assert not ray_spec(document).get("enableInTreeAutoscaling")


@pytest.mark.parametrize("name", ["kueue/job.yaml", "volcano/job.yaml"])
def test_a_pod_runs_the_command_under_a_fixed_name_and_has_time_to_save(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    job = load(name)
    template = (job["spec"].get("tasks") or [job["spec"]])[0]["template"]
    (container,) = template["spec"]["containers"]
    check_command([*container["command"], *container["args"]], job["metadata"]["name"])
    check_confined(template["spec"])
    check_image(container["image"])
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["terminationGracePeriodSeconds"] > 30  # Kubernetes' default


@pytest.mark.parametrize("name", ["kueue/rayjob.yaml", "volcano/rayjob.yaml"])
def test_a_rayjob_has_as_many_workers_as_are_admitted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    document = load(name)
    spec = check_command(shlex.split(document["spec"]["entrypoint"]), document["metadata"]["name"])
    head, (group,) = ray_spec(document)["headGroupSpec"], ray_spec(document)["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    assert spec.workers.min == spec.workers.max == group["replicas"]
    for each in (head, group):
        check_confined(each["template"]["spec"])
        check_image(first_container(each)["image"])


def check_command(words: list[str], run: str) -> Any:
    """The spec of a `lockstep train` that can be repeated."""
    from typer.main import get_command

    from lockstep.cli.main import app

    program, command, *rest = words
    assert (program, command) == ("lockstep", "train")
    with get_command(app).commands[command].make_context(command, rest) as context:  # type: ignore[attr-defined]
        assert context.params["run_name"] == run
        spec = load_spec(context.params["spec"], context.params["overrides"])
    assert spec.checkpoint.storage.startswith("/shared/")
    return spec


RAY = [path for path in RESOURCES if "ray" in path.name]


@pytest.mark.parametrize("path", RAY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_head_that_ends_has_its_runs_save_first(path: Path) -> None:
    """KubeRay deletes the pods of a suspended RayJob without stopping its job."""
    (document,) = documents(path)
    assert kind_of(document).startswith("ray.io/")
    head = ray_spec(document)["headGroupSpec"]
    told = options(first_container(head)["lifecycle"]["preStop"]["exec"]["command"])
    assert told["wait"] and told["stop_runs"]
    assert told["seconds"] < head["template"]["spec"]["terminationGracePeriodSeconds"]


# --- Slurm ------------------------------------------------------------------------------------------------

SCRIPT = CLUSTER / "slurm" / "train.sbatch"


def directives() -> list[str]:
    return [
        word
        for line in SCRIPT.read_text().splitlines()
        if line.startswith("#SBATCH")
        for word in line.split()[1:]
    ]


def test_a_slurm_script_is_requeued_and_hears_of_its_end_in_time() -> None:
    assert {"--requeue", "--open-mode=append"} <= set(directives())
    (told,) = [word for word in directives() if word.startswith("--signal=")]
    number, _, seconds = told.removeprefix("--signal=").partition("@")
    assert number == "TERM"  # no B: that would end the script, and not the run
    assert int(seconds) >= 60
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    (code,) = re.findall(r'"\$code" -eq (\d+)', SCRIPT.read_text())
    assert int(code) == ExitCode.TERMINATED


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130, 143])
def test_a_slurm_script_asks_to_be_requeued_where_a_signal_has_ended_the_run(
    tmp_path: Path, code: int
) -> None:
    """And hands every code on."""
    for name, text in (("srun", f"exit {code}"), ("scontrol", 'echo "$@" > asked; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "digits-1", "SLURM_CPUS_PER_TASK": "2"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOCKSTEP_RUNS": "/shared", **slurm}
    done = subprocess.run(
        ["bash", str(SCRIPT)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert (tmp_path / "asked").exists() == (code == ExitCode.TERMINATED)
