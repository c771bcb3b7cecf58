"""Models that leave Lockstep: artifacts made of a run's weights, compared with eager mode, and called again without the job."""
