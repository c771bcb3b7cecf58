"""Ray's settings in the environment of every process that Lockstep starts."""

from __future__ import annotations

RAY_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # 2 s by default, which delays the end of every attempt
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # it would be an actor for what the driver watches itself
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the controller runs in the driver, whose logging it would take over
    "RAY_worker_niceness": "0",  # 15 by default: any other program on the machine would get the processors first
    "RAY_prestart_worker_first_driver": "0",  # no run uses these processes, and they start while a run's own do
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # so relative paths in a job mean the same in a worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
