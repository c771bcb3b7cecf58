"""What the files in `cluster/` are held against: Ray's own functions, the definitions of KubeRay, Kueue and Volcano, and rules of the house."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
FIELDS = Path(__file__).with_name("resource_fields.json")
"""The fields of the definitions below that the files in `cluster/` use: `python -m tests.unit.clusters.schemas` writes it."""
CRD_FOLDER = "LOCKSTEP_CRDS"
"""Environment variable: a folder with the files of DEFINITIONS."""
DEFINITIONS = {
    "ray.io/v1 RayJob": "ray.io_rayjobs.yaml",
    "ray.io/v1 RayCluster": "ray.io_rayclusters.yaml",
    "kueue.x-k8s.io/v1beta2 Topology": "kueue.x-k8s.io_topologies.yaml",
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": "kueue.x-k8s.io_resourceflavors.yaml",
    "kueue.x-k8s.io/v1beta2 ClusterQueue": "kueue.x-k8s.io_clusterqueues.yaml",
    "kueue.x-k8s.io/v1beta2 LocalQueue": "kueue.x-k8s.io_localqueues.yaml",
    "kueue.x-k8s.io/v1beta2 WorkloadPriorityClass": "kueue.x-k8s.io_workloadpriorityclasses.yaml",
    "scheduling.volcano.sh/v1beta1 Queue": "scheduling.volcano.sh_queues.yaml",
    "batch.volcano.sh/v1alpha1 Job": "batch.volcano.sh_jobs.yaml",
    "batch/v1 Job": "jobset.x-k8s.io_jobsets.yaml",
}
"""Where each kind is defined: the files of ray-project/kuberay, kubernetes-sigs/kueue, volcano-sh/volcano and kubernetes-sigs/jobset."""
RESOURCES = [
    *(CLUSTER / "kuberay" / name for name in ("rayjob.yaml", "rayjob-gpu.yaml", "raycluster.yaml")),
    *(CLUSTER / "kueue" / name for name in ("queues.yaml", "job.yaml", "rayjob.yaml")),
    *(CLUSTER / "volcano" / name for name in ("queue.yaml", "job.yaml", "rayjob.yaml")),
]


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kind_of(document: Mapping[str, Any]) -> str:
    """A key of DEFINITIONS."""
    return f"{document['apiVersion']} {document['kind']}"


@cache
def definition(kind: str) -> dict[str, Any]:
    """The schema of a kind, as far as the files here use it; strict: any other key is refused."""
    known: dict[str, Any] = json.loads(FIELDS.read_text())[kind]
    return _strict(known)


@cache
def full_definition(kind: str) -> dict[str, Any]:
    """The schema as its project publishes it."""
    folders = [os.environ.get(CRD_FOLDER), str(ROOT.parent / "shared" / "kuberay")]
    files = [Path(folder, DEFINITIONS[kind]) for folder in folders if folder]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        pytest.skip(f"{kind} is not defined here: set {CRD_FOLDER} to a folder with {files[-1].name}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 1.4 MB: 8 s without C
    definitions = yaml.load(found.read_text(), Loader=loader)["spec"]
    version = kind.split()[0].partition("/")[2]
    if (
        kind == "batch/v1 Job"
    ):  # Kubernetes publishes no definition of its own in this form; a JobSet holds whole Jobs
        schema = definitions["versions"][0]["schema"]["openAPIV3Schema"]
        sets = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
        job: dict[str, Any] = copy.deepcopy(sets["properties"]["template"])
        job["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
        return job
    schema = next(v for v in definitions["versions"] if v["name"] == version)["schema"]["openAPIV3Schema"]
    return dict(schema)


def used_fields(schema: Mapping[str, Any], nodes: Sequence[Any]) -> dict[str, Any]:
    """What `schema` says of the fields that `nodes` have, and of those that it asks for."""
    left = {"description", "format", "default", "properties", "items"}
    kept = {key: value for key, value in schema.items() if key not in left}
    mappings = [node for node in nodes if isinstance(node, Mapping)]
    if "properties" in schema:
        names = {name for node in mappings for name in node} | set(schema.get("required", []))
        kept["properties"] = {
            name: used_fields(schema["properties"][name], [node[name] for node in mappings if name in node])
            for name in sorted(names & schema["properties"].keys())
        }
    if "items" in schema:
        kept["items"] = used_fields(
            schema["items"], [part for node in nodes if isinstance(node, list) for part in node]
        )
    return kept


def resource_fields(kind: str) -> dict[str, Any]:
    """What FIELDS has for a kind, made from its definition as it is published and the files in `cluster/`."""
    used = [document for path in RESOURCES for document in documents(path) if kind_of(document) == kind]
    if kind == "ray.io/v1 RayCluster":
        pods = documents(CLUSTER / "mlflow" / "deployment.yaml")[0]["spec"]["template"]
        used.append({"spec": {"headGroupSpec": {"template": pods}}})
    return used_fields(full_definition(kind), used)


def _strict(schema: Any) -> Any:
    """Kubernetes drops what it does not know without a word; here that is an error."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(part) for key, part in schema.items() if key != "format"}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict["properties"] = {name: _strict(part) for name, part in schema["properties"].items()}
        strict.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return strict


def check_custom_resource(document: Mapping[str, Any]) -> None:
    """Against its definition, and what has a Ray cluster through Ray's own autoscaler."""
    schema = copy.deepcopy(definition(kind_of(document)))
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    jsonschema.validate(document, schema)
    if not document["apiVersion"].startswith("ray.io/"):
        return
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    spec = document["spec"].get("rayClusterSpec", document["spec"])
    _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": document["metadata"]["name"], "namespace": "default"}, "spec": spec}
    )


def check_pod_template(template: Mapping[str, Any]) -> None:
    """A Deployment's pods against the schema of pods that KubeRay's definition holds."""
    head = definition("ray.io/v1 RayCluster")["properties"]["spec"]["properties"]["headGroupSpec"]
    schema = copy.deepcopy(head["properties"]["template"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(template, schema)


def check_ray_up(config: Mapping[str, Any]) -> dict[str, Any]:
    """As `ray up` does before it calls the cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(copy.deepcopy(dict(config)))
    validate_config(prepared)
    return prepared


SECRET_NAME = re.compile(r"password|secret|(?<!http)token|access_key(?!_id)|credential", re.IGNORECASE)
NO_VALUE = re.compile(r"^secret(Name|KeyRef)?$|_PATH$")
REFERENCE = re.compile(r"^(\$\{\w+:\?[^}]+\}|~?/[\w/.-]+|token)$")


def literal_secrets(node: Any, path: str = "") -> Iterator[str]:
    """Where a value that is named like a secret stands in clear, rather than as a reference to one."""
    if isinstance(node, Mapping):
        for name, value in _named_values(node):
            if SECRET_NAME.search(name) and not NO_VALUE.search(name) and not REFERENCE.match(value):
                yield f"{path}.{name}"
        for key, value in node.items():
            yield from literal_secrets(value, f"{path}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from literal_secrets(value, f"{path}[{i}]")
    elif isinstance(node, str) and re.search(r"://[^/\s:@$]+:[^@/\s$]+@", node):
        yield path


def _named_values(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`NAME: value` as compose has it, and `{name: NAME, value: value}` as Kubernetes does."""
    yield from ((str(key), value) for key, value in node.items() if isinstance(value, str))
    if isinstance(node.get("name"), str) and isinstance(node.get("value"), str):
        yield node["name"], node["value"]


def check_compose(document: Mapping[str, Any]) -> None:
    """The parts of a compose file fit together, nothing is published beyond loopback, no secret is in it."""
    services = document["services"]
    for name, service in services.items():
        if not {"image", "build"} & service.keys():
            raise ValueError(f"{name}: has neither image nor build")
        for needed, condition in service.get("depends_on", {}).items():
            if needed not in services:
                raise ValueError(f"{name}: depends on {needed!r}, which is no service")
            if condition["condition"] == "service_healthy" and "healthcheck" not in services[needed]:
                raise ValueError(f"{name}: waits for {needed!r} to be healthy, which has no healthcheck")
        for port in service.get("ports", []):
            if not port.startswith("127.0.0.1:"):
                raise ValueError(f"{name}: publishes {port} beyond loopback")
        for secret in service.get("secrets", []):
            if secret not in document["secrets"]:
                raise ValueError(f"{name}: uses the secret {secret!r}, which is not declared")
        for volume in service.get("volumes", []):
            if volume.partition(":")[0] not in document["volumes"]:
                raise ValueError(f"{name}: mounts {volume!r}, which is not declared")
        if "image" in service:
            check_image(service["image"])
        words = str(service.get("command", ""))
        if "ray start" in words and service["environment"].get("RAY_AUTH_MODE") != "token":
            raise ValueError(f"{name}: starts Ray without RAY_AUTH_MODE=token")
        if "mlflow server" in words and not {"--app-name", "--allowed-hosts"} <= set(words.split()):
            raise ValueError(f"{name}: starts MLflow without --app-name basic-auth and --allowed-hosts")
    _check_rights(services)
    clear = list(literal_secrets(document))
    if clear:
        raise ValueError(f"secrets in clear: {', '.join(clear)}")


def _check_rights(services: Mapping[str, Any]) -> None:
    """Neither an administrator of MLflow nor the root of the object store is given to whoever needs less."""
    head, worker, mlflow = (services[name]["environment"] for name in ("head", "worker", "mlflow"))
    if head["MLFLOW_TRACKING_USERNAME"] == "admin" or "ADMIN" in head["MLFLOW_TRACKING_PASSWORD"]:
        raise ValueError("head: has MLflow's admin account")
    if any(name.startswith(("MLFLOW", "AWS")) for name in worker):
        raise ValueError("worker: has an account that it does not need")
    root = services["s3"]["environment"]["MINIO_ROOT_USER"]
    if mlflow["AWS_ACCESS_KEY_ID"] == root or "ROOT" in mlflow["AWS_SECRET_ACCESS_KEY"]:
        raise ValueError("mlflow: has the root key of the object store")


def check_confined(pod: Mapping[str, Any], *, token: bool = False) -> None:
    """A pod that runs as nobody in particular, under the runtime's seccomp profile, without a token unless it needs one."""
    owner = pod["securityContext"]
    if not owner.get("runAsNonRoot") or owner.get("seccompProfile") != {"type": "RuntimeDefault"}:
        raise ValueError("it may run as root, or make any call to the system")
    if not token and pod.get("automountServiceAccountToken") is not False:
        raise ValueError("it has a service account's token")
    for container in pod["containers"]:
        confined = container["securityContext"]
        if confined != {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}:
            raise ValueError(f"{container['name']} has rights that it does not need")


def check_image(image: str) -> None:
    """An image of one release, or of one content."""
    name, _, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if not digest and not re.search(r"\d+\.\d+|\d{4}-\d{2}-\d{2}", tag):
        raise ValueError(f"{image} is not of one release")


POLICY_RULE = {
    "from": {"podSelector", "namespaceSelector", "ipBlock"}, "to": {"podSelector", "namespaceSelector", "ipBlock"},
    "ports": {"protocol", "port"},
}  # fmt: skip


def check_network_policy(document: Mapping[str, Any]) -> None:
    """The fields of a NetworkPolicy, of which Kubernetes drops what it does not know; and a rule that lets in everyone is none."""
    if document["apiVersion"] != "networking.k8s.io/v1" or document["kind"] != "NetworkPolicy":
        raise ValueError("it is no NetworkPolicy")
    spec = document["spec"]
    if spec.keys() - {"podSelector", "policyTypes", "ingress", "egress"} or not spec["podSelector"]:
        raise ValueError(f"unknown fields or all pods: {sorted(spec)}")
    if {kind.lower() for kind in spec["policyTypes"]} != spec.keys() & {"ingress", "egress"}:
        raise ValueError("its types are not those that it has rules for")
    for side, other in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(side, []):
            if not rule.get(other) or rule.keys() - {other, "ports"}:
                raise ValueError(f"{side}: a rule for everyone, or with unknown fields")
            for name, parts in rule.items():
                for part in parts:
                    if not part or part.keys() - POLICY_RULE[name]:
                        raise ValueError(f"{side}.{name}: {part}")


def environment_of(container: Mapping[str, Any]) -> set[str]:
    """The names of a container's variables."""
    return {one["name"] for one in container.get("env", [])}


INSTRUCTIONS = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "CMD"}


def check_dockerfile(text: str) -> None:
    """Every instruction is one, what is copied is there, and the image does not run as root."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    instructions = [line.split() for line in lines]
    for name, *words in instructions:
        if name not in INSTRUCTIONS:
            raise ValueError(f"unknown instruction {name!r}")
        if name == "COPY":
            for source in words[:-1]:
                if not (ROOT / source).exists():
                    raise ValueError(f"COPY: there is no {source!r}")
    users = [words[0] for name, *words in instructions if name == "USER"]
    if not users or users[-1] in {"root", "0"}:
        raise ValueError("the image would run as root")
    if not any(words[0].startswith("TORCH_INDEX=") for name, *words in instructions if name == "ARG"):
        raise ValueError("no TORCH_INDEX to choose the CPU or the CUDA build with")


if __name__ == "__main__":
    FIELDS.write_text(json.dumps({kind: resource_fields(kind) for kind in DEFINITIONS}, indent=1) + "\n")
