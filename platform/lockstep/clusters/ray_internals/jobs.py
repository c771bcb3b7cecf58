"""What a driver knows of the job that started it. See `unavailable`."""

from __future__ import annotations

import json
import os


def submission_id() -> str | None:
    """The id of this driver's job; None for a driver that the job API has not started."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY

    job_config = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
    job_id: str | None = job_config.get("metadata", {}).get(JOB_ID_METADATA_KEY)
    return job_id
