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
    # A node asks its object store before that listens, every second time. It asks again after 50 ms, 1 s by default, and gives up after 10 s, as by default.
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    "RAY_raylet_client_num_connect_attempts": "200",
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine a node does not start in 30 s, the default
    # A process that has not come by then is given up, and the next one begins anew: with 60 s, the default, none ever comes on a busy machine.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # so relative paths in a job mean the same in a worker
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

UNSEEN = {
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
}
"""Where a command starts a cluster for itself: nothing is gathered that only a dashboard would show. That took a hundredth of a core."""
