"""The only access to Ray's private parts: nothing outside this package imports them, or knows the words between Ray's processes.

Each part is checked before it is used: whether its names exist, with the parameters that Lockstep passes or
overrides, and whether instances have the attributes that it reads. If not, as with another version of Ray, the caller uses a public way or does without:

| part | without it |
|---|---|
| driver trainer | Ray's public TorchTrainer: a restart takes seconds longer, Ray chooses the nodes |
| forked workers | every worker imports what it needs by itself, and its set-up imports Ray |
| nodes | notices that a node is about to go are not heard, `lockstep cluster leave`, and so the agent that hears them, is refused, and a run does not wait for an autoscaler to make room for its start |
| key-values | `lockstep cluster status` lists no runs |
| packages | `lockstep submit` does not say beforehand what is too large |
| own node | a local cluster of a command's own has processes that nobody uses: it starts one or two seconds later, and ends one later; SIGTERM to all processes at once, as from Slurm, ends it before a last checkpoint |

This module itself imports nothing of Ray: workers get copies of what lies beside it.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

PUBLIC_ONLY = "LOCKSTEP_PUBLIC_RAY"
"""Environment variable: with 1 no private part is used, as if Ray had none of them."""

Part = Literal[
    "driver trainer",
    "forked workers",
    "nodes",
    "key-values",
    "packages",
    "own node",
]

_TRAIN = "ray.train.v2._internal"
_CONTROLLER = f"{_TRAIN}.execution.controller:TrainController"
_GROUPS = f"{_TRAIN}.execution.worker_group"
_GROUP = f"{_GROUPS}:WorkerGroup"
CONTROLLER_LOGGER = f"{_TRAIN}.execution.controller.controller"
"""By which Ray Train's controller logs the traceback of what ends it."""

_CALLBACK = f"{_TRAIN}.execution.callback"
_FIXED = f"{_TRAIN}.execution.scaling_policy:FixedScalingPolicy"

NEEDED: dict[Part, dict[str, tuple[str, ...] | None]] = {
    "driver trainer": {
        f"{_CONTROLLER}.worker_group_cls": None,
        f"{_CONTROLLER}.run": ("self",),
        f"{_CONTROLLER}.get_result": ("self",),
        f"{_CONTROLLER}.get_worker_group": ("self",),
        f"{_CONTROLLER}.__init__": (
            "self",
            "train_fn_ref",
            "train_run_context",
            "scaling_policy",
            "failure_policy",
            "callbacks",
            "validation_config",
        ),
        f"{_GROUPS}.worker:RayTrainWorker.init_train_context": (
            "self",
            "train_run_context",
            "distributed_context",
            "synchronization_actor",
            "storage_context",
            "worker_callbacks",
            "controller_actor",
            "dataset_shard_provider",
            "checkpoint",
            "has_validation_fn",
            "current_report_index",
        ),
        f"{_GROUPS}.worker:RayTrainWorker.poll_status": ("self",),
        f"{_GROUPS}.thread_runner:ThreadRunner.is_running": ("self",),
        f"{_GROUPS}.thread_runner:ThreadRunner.get_error": ("self",),
        f"{_TRAIN}.execution.context:get_train_context": (),
        f"{_GROUP}._worker_cls": None,
        f"{_GROUP}._start": ("self",),
        f"{_GROUP}._clear_state": ("self",),
        f"{_GROUP}._create_placement_group": ("self", "scaling_config", "worker_group_context"),
        f"{_GROUP}._create_workers": None,
        f"{_GROUP}._init_train_context_on_workers": (
            "self",
            "workers",
            "sync_actor",
            "train_context_args",
        ),
        f"{_GROUP}._decorate_worker_log_file_paths": ("workers",),
        f"{_GROUP}.poll_status": ("self", "timeout"),
        f"{_GROUPS}.poll:WorkerStatus": None,
        f"{_GROUPS}.poll:WorkerGroupPollStatus.errors": None,
        f"{_GROUP}.get_workers": ("self",),
        f"{_GROUP}.has_started": ("self",),
        f"{_GROUP}.shutdown": ("self",),
        f"{_CALLBACK}:ControllerCallback.after_controller_state_update": (
            "self",
            "previous_state",
            "current_state",
        ),
        f"{_CALLBACK}:WorkerGroupCallback.after_worker_group_training_start": ("self", "worker_group"),
        f"{_CALLBACK}:WorkerGroupCallback.after_worker_group_poll_status": ("self", "worker_group_status"),
        f"{_FIXED}.after_controller_start": ("self", "train_run_context"),
        f"{_FIXED}._maybe_send_resource_request": ("self",),
        f"{_TRAIN}.execution.failure_handling:FailurePolicy.make_decision": (
            "self",
            "training_failed_error",
        ),
        f"{_TRAIN}.execution.failure_handling:FailureDecision.RETRY": None,
        f"{_TRAIN}.execution.failure_handling:FailureDecision.RAISE": None,
        f"{_TRAIN}.exceptions:WorkerGroupStartupTimeoutError": None,
        f"{_TRAIN}.callbacks.datasets:DatasetsCallback": None,
        f"{_TRAIN}.callbacks.state_manager:StateManagerCallback.after_controller_start": (
            "self",
            "train_run_context",
        ),
        f"{_TRAIN}.state.state_manager:TrainStateManager.create_train_run": (
            "self",
            "id",
            "name",
            "job_id",
            "controller_actor_id",
            "controller_log_file_path",
            "run_config",
            "train_loop_config",
            "scaling_config",
            "backend_config",
            "datasets",
            "dataset_config",
        ),
        f"{_TRAIN}.state.state_manager:TrainStateManager._create_or_update_train_run": (
            "self",
            "run",
            "block",
        ),
        f"{_TRAIN}.callbacks.placement_group_callback:PlacementGroupCleanerCallback": None,
        "ray.train.torch:TorchTrainer._create_default_callbacks": ("self",),
        "ray.train.torch:TorchTrainer._initialize_and_run_controller": ("self", "controller_init_kwargs"),
    },
    "forked workers": {
        "ray.actor:ActorClassID": None,
        "ray._raylet:ActorClassID.from_random": None,
        "ray._raylet:ActorClassID.size": None,
        "ray._raylet:ObjectRef.from_random": None,
        "ray._private.ray_constants:SETUP_WORKER_FILENAME": None,
        "ray._private.runtime_env.context:RuntimeEnvContext.__init__": (
            "self",
            "command_prefix",
            "env_vars",
            "py_executable",
            "override_worker_entrypoint",
            "java_jars",
        ),
    },
    "nodes": {
        "ray._private.state:state.get_draining_nodes": (),
        "ray._private.state:state.get_max_resources_from_cluster_config": (),
        "ray._private.state:available_resources_per_node": (),
        "ray._raylet:GcsClient": None,  # its methods are made when it is
        "ray.core.generated.autoscaler_pb2:DrainNodeReason": None,
    },
    "key-values": {
        "ray.experimental.internal_kv:_internal_kv_put": ("key", "value", "overwrite", "namespace"),
        "ray._raylet:GcsClient": None,  # its methods are made when it is
    },
    "packages": {
        "ray._private.ray_constants:DASHBOARD_CLIENT_MAX_SIZE": None,
        "ray._private.runtime_env.packaging:GCS_STORAGE_MAX_SIZE": None,
        "ray._private.runtime_env.packaging:create_package": None,
        "ray._private.runtime_env.packaging:_dir_travel": None,
        "ray._private.runtime_env.packaging:_get_excludes": ("path", "excludes"),
    },
    "own node": {
        "ray._private.node:Node.start_monitor": ("self",),
        "ray._private.node:Node.start_api_server": ("self", "include_dashboard", "raise_on_failure"),
        "ray._private.node:Node.start_log_monitor": ("self",),
        "ray._private.services:get_node": ("gcs_address", "node_id"),
        "ray._private.services:ConsolePopen": None,
        "ray._private.utils:set_sigterm_handler": ("sigterm_handler",),
        "ray._private.services:_get_gcs_client_options": ("gcs_server_address",),
        "ray._private.state:GlobalState._initialize_global_state": ("self", "gcs_options"),
        "ray._private.state:GlobalState.node_table": ("self",),
        "ray._raylet:persist_port": None,
        "ray._raylet:METRICS_AGENT_PORT_NAME": None,
        "ray._raylet:METRICS_EXPORT_PORT_NAME": None,
        "ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME": None,
    },
}
"""The names that each part needs, as `module:name`, with the parameters that Lockstep passes by name or overrides."""

ATTRIBUTES: dict[Part, dict[str, tuple[str, ...]]] = {
    "driver trainer": {
        _GROUP: (
            "_worker_group_state",
            "_callbacks",
            "_train_run_context",
            "_storage_context",
            "_worker_callbacks_to_propagate",
        ),
        f"{_GROUPS}.state:WorkerGroupState": ("shutdown",),
        f"{_GROUPS}.state:WorkerGroupContext": ("label_selector",),
        f"{_GROUPS}.worker:Worker": ("actor", "distributed_context"),
        f"{_GROUPS}.placement_group_handle:PlacementGroupHandle": ("wait", "shutdown", "placement_group"),
        f"{_GROUPS}.poll:WorkerGroupPollStatus": ("worker_statuses",),
        f"{_GROUPS}.poll:WorkerStatus": ("running",),
        f"{_TRAIN}.exceptions:WorkerHealthCheckFailedError": ("health_check_failure",),
        "ray.train.v2.api.exceptions:ControllerError": ("controller_failure",),
        f"{_TRAIN}.execution.context:TrainContext": ("execution_context",),
        f"{_TRAIN}.execution.context:ExecutionContext": ("training_thread_runner", "result_queue"),
        f"{_TRAIN}.execution.context:TrainRunContext": (
            "run_config",
            "scaling_config",
            "backend_config",
            "dataset_config",
        ),
        f"{_TRAIN}.callbacks.state_manager:StateManagerCallback": ("_state_manager", "_run_id"),
        f"{_TRAIN}.state.state_manager:TrainStateManager": ("_runs",),
        f"{_TRAIN}.state.schema:TrainRun": ("name",),
        "ray.train.torch:TorchTrainer": ("scaling_config", "run_config"),
        "ray.actor:ActorHandle": ("_actor_id",),
    },
}
"""The attributes that each part reads of instances, by their class as `module:name`."""


def is_public_only() -> bool:
    """Whether no private part is to be used. Read each time: it may be set for one run of several."""
    return os.environ.get(PUBLIC_ONLY) == "1"


def unavailable(part: Part) -> str | None:
    """Why a part cannot be used with the installed Ray, in a few words; None if it can."""
    if is_public_only():
        return f"{PUBLIC_ONLY} is 1"
    return _differs(part)


@cache
def _differs(part: Part) -> str | None:
    for name, parameters in NEEDED[part].items():
        problem = _problem(name, parameters)
        if problem is not None:
            return f"Ray {version('ray')}: {problem}"
    for name, attributes in ATTRIBUTES.get(part, {}).items():
        problem = _lacks(name, attributes)
        if problem is not None:
            return f"Ray {version('ray')}: {problem}"
    return None


def _resolve(name: str) -> Any:
    """The object at `module:attribute.attribute`."""
    module, _, path = name.partition(":")
    target: Any = importlib.import_module(module)
    for attribute in path.split("."):
        target = getattr(target, attribute)
    return target


def _problem(name: str, parameters: tuple[str, ...] | None) -> str | None:
    """What is wrong with `module:attribute.attribute`; None if nothing is."""
    try:
        target = _resolve(name)
    except (ImportError, AttributeError) as error:
        return f"{name} is not there ({type(error).__name__})"
    if parameters is None:
        return None
    # Ray adds the parameter to a method when its class becomes an actor
    have = tuple(name for name in inspect.signature(target).parameters if name != "_ray_trace_ctx")
    return None if have == parameters else f"{name} takes {', '.join(have) or 'nothing'}"


def _lacks(name: str, attributes: tuple[str, ...]) -> str | None:
    """Which attribute instances of the class at `module:name` lack; None if they have all."""
    problem = _problem(name, None)
    if problem is not None:
        return problem
    target = _resolve(name)
    return next((f"{name} has no {each}" for each in attributes if not _has(target, each)), None)


def _has(kind: type, attribute: str) -> bool:
    """Whether instances of a class have an attribute: the class has it, declares it for them, or sets it in a method."""
    return hasattr(kind, attribute) or any(
        attribute in inspect.get_annotations(each)
        or any(_sets(attribute, method) for method in vars(each).values())
        for each in kind.__mro__
    )


def _sets(attribute: str, method: Any) -> bool:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return (
        code is not None
        and attribute in code.co_names
        and any(
            step.opname == "STORE_ATTR" and step.argval == attribute for step in dis.get_instructions(code)
        )
    )


def rays_set_up() -> str:
    """The script by which Ray itself sets up a worker."""
    module_spec = importlib.util.find_spec("ray")  # which does not import it
    assert module_spec is not None
    assert module_spec.origin is not None
    return str(Path(module_spec.origin).parent / "_private" / "workers" / "setup_worker.py")


def warnings_of_ray() -> list[str]:
    """Warnings for a run that must do without Ray's private parts."""
    reason = unavailable("driver trainer")
    if reason is not None:
        return [
            f"ray: the run goes through Ray's public TorchTrainer ({reason}): a lost worker takes some seconds longer to "
            "replace, and Ray chooses the nodes"
        ]
    effects: dict[Part, str] = {
        "nodes": "a notice that a node is about to go is not heard",
    }
    reasons = {part: unavailable(part) for part in effects}
    return [f"ray: {effects[part]} ({reason})" for part, reason in reasons.items() if reason is not None]
