"""Clusters: connecting to one, starting one on this machine, and sending a run to one as a job."""
