"""Every file in `cluster/` is what it says it is, and a broken copy of each is found out."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lockstep.spec.loading import load_spec
from tests.unit.clusters.schemas import (
    CLUSTER,
    DEFINITIONS,
    FIELDS,
    ROOT,
    check_compose,
    check_confined,
    check_custom_resource,
    check_dockerfile,
    check_image,
    check_network_policy,
    check_pod_template,
    check_ray_up,
    documents,
    environment_of,
    literal_secrets,
    resource_fields,
)

MANIFESTS = ["rayjob.yaml", "rayjob-gpu.yaml", "raycluster.yaml"]
JOBS = MANIFESTS[:2]
Breaks = Callable[[dict[str, Any]], object]


def manifest(name: str) -> dict[str, Any]:
    (document,) = documents(CLUSTER / "kuberay" / name)
    return document


def ray_spec(document: dict[str, Any]) -> dict[str, Any]:
    return document["spec"].get("rayClusterSpec", document["spec"])


def first_container(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]["containers"][0]


# --- KubeRay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_kuberay_manifest_fits_its_definition(name: str) -> None:
    check_custom_resource(manifest(name))


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_the_fields_that_are_kept_here_are_those_that_are_published(kind: str) -> None:
    """Needs what the projects publish; the tests around it need the fields alone."""
    assert json.loads(FIELDS.read_text())[kind] == resource_fields(kind)


BROKEN_MANIFESTS: dict[str, Breaks] = {
    "misspelt": lambda d: ray_spec(d).update(enableInTreeAutoscalling=True),
    "auth": lambda d: ray_spec(d)["authOptions"].update(mode="tokens"),
    "number as start param": lambda d: ray_spec(d)["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    "replicas as text": lambda d: ray_spec(d)["workerGroupSpecs"][0].update(maxReplicas="8"),
    "no head": lambda d: ray_spec(d).pop("headGroupSpec"),
    "deep in a pod": lambda d: first_container(ray_spec(d)["workerGroupSpecs"][0]).update(comand=["ray"]),
}


@pytest.mark.parametrize("breaks", BROKEN_MANIFESTS.values(), ids=BROKEN_MANIFESTS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_broken_kuberay_manifest_does_not(name: str, breaks: Breaks) -> None:
    document = copy.deepcopy(manifest(name))
    breaks(document)
    with pytest.raises(jsonschema.ValidationError):
        check_custom_resource(document)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_kuberay_cluster_is_guarded_elastic_and_has_its_head_off_spot_nodes(name: str) -> None:
    spec = ray_spec(manifest(name))
    assert spec["authOptions"] == {"mode": "token"}
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    affinity = head["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {rule["operator"] for rule in term["matchExpressions"]} == {"NotIn", "DoesNotExist"}
    assert workers["minReplicas"] < workers["maxReplicas"]
    for group in (head, workers):
        resources = first_container(group)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        mounted = {mount["mountPath"] for mount in first_container(group)["volumeMounts"]}
        assert "/shared" in mounted
        check_image(first_container(group)["image"])
        check_confined(group["template"]["spec"], token=group is head)
    assert "MLFLOW_TRACKING_PASSWORD" in environment_of(first_container(head))
    assert not any("MLFLOW" in name or "AWS" in name for name in environment_of(first_container(workers)))
    assert not list(literal_secrets(manifest(name)))


BROKEN_PODS: dict[str, Breaks] = {
    "root": lambda p: p["securityContext"].pop("runAsNonRoot"),
    "any call": lambda p: p["securityContext"].pop("seccompProfile"),
    "token": lambda p: p.pop("automountServiceAccountToken"),
    "rights": lambda p: p["containers"][0]["securityContext"].update(allowPrivilegeEscalation=True),
}


@pytest.mark.parametrize("breaks", BROKEN_PODS.values(), ids=BROKEN_PODS)
def test_a_pod_with_more_rights_is_found_out(breaks: Breaks) -> None:
    for pod in (
        ray_spec(manifest("rayjob.yaml"))["workerGroupSpecs"][0]["template"]["spec"],
        deployment()["spec"]["template"]["spec"],
    ):
        breaks(pod := copy.deepcopy(pod))
        with pytest.raises(ValueError):
            check_confined(pod)


def policies() -> list[dict[str, Any]]:
    files = [CLUSTER / "kuberay" / "network.yaml", CLUSTER / "mlflow" / "deployment.yaml"]
    found = [document for file in files for document in documents(file)]
    return [document for document in found if document["kind"] == "NetworkPolicy"]


def test_pods_are_reached_by_those_who_need_them() -> None:
    for policy in policies():
        check_network_policy(policy)
    selected = [policy["spec"]["podSelector"] for policy in policies()]
    assert {"matchLabels": {"app": "mlflow"}} in selected and len(selected) == 3
    outwards = [rule for policy in policies() for rule in policy["spec"].get("egress", [])]
    assert all("169.254.169.254/32" in rule["to"][0]["ipBlock"]["except"] for rule in outwards)


BROKEN_POLICIES: dict[str, Breaks] = {
    "misspelt": lambda s: s.update(ingres=[]),
    "from everyone": lambda s: s["ingress"].append({"ports": [{"port": 5000}]}),
    "from anything": lambda s: s["ingress"][0]["from"].append({}),
    "all pods": lambda s: s.update(podSelector={}),
    "no type": lambda s: s.update(policyTypes=["Egress"]),
}


@pytest.mark.parametrize("breaks", BROKEN_POLICIES.values(), ids=BROKEN_POLICIES)
def test_a_broken_network_policy_is_found_out(breaks: Breaks) -> None:
    policy = copy.deepcopy(policies()[-1])
    breaks(policy["spec"])
    with pytest.raises(ValueError):
        check_network_policy(policy)


@pytest.mark.parametrize("image", ["minio/minio:latest", "postgres", "postgres:17", "registry:5000/lockstep"])
def test_an_image_of_no_release_is_found_out(image: str) -> None:
    with pytest.raises(ValueError):
        check_image(image)


@pytest.mark.parametrize("name", JOBS)
def test_the_entrypoint_of_a_rayjob_can_be_run_and_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--run` has a fixed name, the workers are those of the group, and the files go where all pods look."""
    from typer.main import get_command

    from lockstep.cli.main import app

    monkeypatch.chdir(ROOT)
    document = manifest(name)
    program, command, *words = shlex.split(document["spec"]["entrypoint"])
    assert (program, command) == ("lockstep", "train")
    with get_command(app).commands[command].make_context(command, words) as context:  # type: ignore[attr-defined]
        spec = load_spec(context.params["spec"], context.params["overrides"])
        assert context.params["run_name"] == document["metadata"]["name"]
    (group,) = ray_spec(document)["workerGroupSpecs"]
    assert (spec.workers.min, spec.workers.max) == (group["minReplicas"], group["maxReplicas"])
    assert str(spec.workers.cpus_each).removesuffix(".0") == group["rayStartParams"]["num-cpus"]
    assert spec.checkpoint.storage.startswith("/shared/")
    assert str(spec.folder).startswith("/shared/")
    assert document["spec"]["backoffLimit"] > 0
    assert document["spec"]["shutdownAfterJobFinishes"]


def options(words: list[str]) -> dict[str, Any]:
    """What a command of Lockstep is given, as the command line takes it."""
    from typer.main import get_command

    from lockstep.cli.main import app

    program, group, name, *rest = words
    assert (program, group) == ("lockstep", "cluster")
    command = get_command(app).commands[group].commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, rest) as context:
        found: dict[str, Any] = context.params
        return found


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_that_ends_leaves_the_runs_time_to_move(name: str) -> None:
    """Its node is drained before Ray is told to end, and that takes no longer than the pod has."""
    (group,) = ray_spec(manifest(name))["workerGroupSpecs"]
    hook = first_container(group)["lifecycle"]["preStop"]["exec"]["command"]
    told = options(hook)
    assert told["wait"]
    assert told["seconds"] < group["template"]["spec"]["terminationGracePeriodSeconds"]
    with pytest.raises(Exception, match="No such option"):
        options([*hook, "--waits"])


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_the_agent_of_a_node_asks_its_clouds_metadata_service(cloud: str) -> None:
    from lockstep.clusters.preemption import sources

    (line,) = [line for line in ray_up(cloud)["worker_start_ray_commands"] if "ray start" in line]
    found = re.search(r"lockstep cluster notices [^>]*", line)
    assert found is not None
    told = options(shlex.split(found[0]))
    assert sources(told["cloud"], told["metadata"])
    assert told["cloud"] == cloud


def test_the_gpu_variant_asks_for_gpus() -> None:
    (group,) = ray_spec(manifest("rayjob-gpu.yaml"))["workerGroupSpecs"]
    assert first_container(group)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "workers.gpus_each=1" in manifest("rayjob-gpu.yaml")["spec"]["entrypoint"]


def test_the_shared_folder_can_be_written_from_every_node() -> None:
    (claim,) = documents(CLUSTER / "kuberay" / "storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in MANIFESTS:
        volumes = ray_spec(manifest(name))["headGroupSpec"]["template"]["spec"]["volumes"]
        assert {"name": "runs", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in volumes


# --- ray up -----------------------------------------------------------------------------------------------


def ray_up(cloud: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / "ray-up" / f"{cloud}.yaml").read_text())


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_ray_up_file_passes_rays_own_checks(cloud: str) -> None:
    prepared = check_ray_up(ray_up(cloud))
    assert prepared["available_node_types"]["head"]["resources"] == {"CPU": 0}
    workers = prepared["available_node_types"]["workers"]["node_config"]
    head = prepared["available_node_types"]["head"]["node_config"]
    spot = {"aws": "InstanceMarketOptions", "gcp": "scheduling"}[cloud]
    assert spot in workers
    assert spot not in head
    starts = prepared["head_start_ray_commands"] + prepared["worker_start_ray_commands"]
    for line in (line for line in starts if "ray start" in line):
        assert "RAY_AUTH_MODE=token" in line
        assert "0.0.0.0" not in line
    assert not list(literal_secrets(ray_up(cloud)))
    for node in (workers, head):  # else Ray or the cloud lets ssh in from anywhere
        own = node["SecurityGroupIds"] if cloud == "aws" else node["networkInterfaces"][0]["subnetwork"]
        assert "REPLACE" in str(own) and "default" not in str(own)


BROKEN_RAY_UP: dict[str, Breaks] = {
    "misspelt": lambda c: c.update(max_worker=3),
    "negative": lambda c: c.update(max_workers=-1),
    "head of no type": lambda c: c.update(head_node_type="heads"),
    "no node config": lambda c: c["available_node_types"]["workers"].pop("node_config"),
    "commands as text": lambda c: c.update(setup_commands="pip install"),
}


@pytest.mark.parametrize("breaks", BROKEN_RAY_UP.values(), ids=BROKEN_RAY_UP)
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_broken_ray_up_file_does_not(cloud: str, breaks: Breaks) -> None:
    config = ray_up(cloud)
    breaks(config)
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError, TypeError)):
        check_ray_up(config)


# --- Docker and MLflow ------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / "docker" / "compose.yaml").read_text())


def test_the_compose_file_fits_together() -> None:
    check_compose(compose())


BROKEN_COMPOSE: dict[str, Breaks] = {
    "published to all": lambda c: c["services"]["head"].update(ports=["8265:8265"]),
    "no such service": lambda c: c["services"]["worker"].update(
        depends_on={"heads": {"condition": "service_started"}}
    ),
    "never healthy": lambda c: c["services"]["head"].pop("healthcheck"),
    "no auth": lambda c: c["services"]["worker"]["environment"].pop("RAY_AUTH_MODE"),
    "open mlflow": lambda c: c["services"]["mlflow"].update(command="mlflow server --host 0.0.0.0"),
    "password": lambda c: c["services"]["postgres"]["environment"].update(POSTGRES_PASSWORD="postgres"),
    "password in a URI": lambda c: c["services"]["mlflow"]["environment"].update(
        MLFLOW_BACKEND_STORE_URI="postgresql://mlflow:hunter2@postgres/mlflow"
    ),
    "no such volume": lambda c: c["volumes"].pop("database"),
    "no such secret": lambda c: c["secrets"].pop("ray_token"),
    "newest image": lambda c: c["services"]["s3"].update(image="minio/minio:latest"),
    "admin": lambda c: c["services"]["head"]["environment"].update(MLFLOW_TRACKING_USERNAME="admin"),
    "worker with an account": lambda c: c["services"]["worker"]["environment"].update(
        MLFLOW_TRACKING_USERNAME="lockstep"
    ),
    "root key": lambda c: c["services"]["mlflow"]["environment"].update(
        AWS_ACCESS_KEY_ID=c["services"]["s3"]["environment"]["MINIO_ROOT_USER"]
    ),
}


@pytest.mark.parametrize("breaks", BROKEN_COMPOSE.values(), ids=BROKEN_COMPOSE)
def test_a_broken_compose_file_does_not(breaks: Breaks) -> None:
    document = compose()
    breaks(document)
    with pytest.raises(ValueError):
        check_compose(document)


def test_the_dockerfile_can_be_built_from_this_tree() -> None:
    check_dockerfile((CLUSTER / "docker" / "Dockerfile").read_text())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("COPY platform", "COPY plattform"),
        ("USER lockstep", "USER root"),
        ("RUN pip", "RUNS pip"),
        ("TORCH_INDEX=", "TORCH="),
    ],
)
def test_a_broken_dockerfile_is_found_out(right: str, wrong: str) -> None:
    text = (CLUSTER / "docker" / "Dockerfile").read_text()
    assert right in text
    with pytest.raises(ValueError):
        check_dockerfile(text.replace(right, wrong))


def deployment() -> dict[str, Any]:
    return documents(CLUSTER / "mlflow" / "deployment.yaml")[0]


def check_deployment(document: dict[str, Any]) -> None:
    check_pod_template(document["spec"]["template"])
    check_confined(document["spec"]["template"]["spec"])
    (container,) = document["spec"]["template"]["spec"]["containers"]
    if not any(re.match("--app-name=basic-auth$", word) for word in container["args"]):
        raise ValueError("no authentication")
    if not any(word.startswith("--allowed-hosts=") and "*" not in word for word in container["args"]):
        raise ValueError("no host check")
    if list(literal_secrets(document)):
        raise ValueError("a secret in clear")


def test_the_mlflow_deployment_has_valid_pods_and_is_guarded() -> None:
    check_deployment(deployment())
    (service,) = (
        one for one in documents(CLUSTER / "mlflow" / "deployment.yaml") if one["kind"] == "Service"
    )
    (container,) = deployment()["spec"]["template"]["spec"]["containers"]
    (password,) = (one for one in container["env"] if one["name"] == "MLFLOW_AUTH_ADMIN_PASSWORD")
    assert password["valueFrom"]["secretKeyRef"]["name"] == "mlflow-server"  # of which no pod of Ray's hears
    check_image(container["image"])
    assert service["spec"]["selector"] == deployment()["spec"]["template"]["metadata"]["labels"]


BROKEN_DEPLOYMENT: dict[str, Breaks] = {
    "misspelt": lambda c: c.update(commands=["mlflow"]),
    "port as text": lambda c: c.update(ports=[{"containerPort": "5000"}]),
    "no authentication": lambda c: c["args"].remove("--app-name=basic-auth"),
    "no host check": lambda c: c.update(args=[word for word in c["args"] if "allowed" not in word]),
    "password": lambda c: c["env"].append({"name": "PGPASSWORD", "value": "hunter2"}),
}


@pytest.mark.parametrize("breaks", BROKEN_DEPLOYMENT.values(), ids=BROKEN_DEPLOYMENT)
def test_a_broken_mlflow_deployment_is_found_out(breaks: Breaks) -> None:
    document = deployment()
    breaks(document["spec"]["template"]["spec"]["containers"][0])
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        check_deployment(document)


def test_no_file_here_holds_a_key(tmp_path: Path) -> None:
    """Long hexadecimal words and private keys have no place in `cluster/`."""
    for path in (path for path in CLUSTER.rglob("*") if path.is_file()):
        text = path.read_text()
        assert not re.search(r"\b[0-9a-f]{40,}\b|PRIVATE KEY|AKIA[0-9A-Z]{16}", text), path
