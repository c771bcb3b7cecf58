"""Clusters: connecting to one, starting one on this machine, and submitting a run to one as a job."""
