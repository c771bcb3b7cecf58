"""What Ray is told by the environment of every process that Lockstep starts."""

from __future__ import annotations

RAY_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # 2 s by default: it delays the end of every attempt
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # an actor for what the driver looks at itself
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the controller is in the driver: it would take over its logging
    "RAY_worker_niceness": "0",  # 15 by default: any other program on the machine would take the processors from a training
    "RAY_prestart_worker_first_driver": "0",  # processes that no run uses, started while a run's own are
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths in a job mean the same in a worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
