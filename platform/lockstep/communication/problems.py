"""What can be wrong with the exchange between workers: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ClusterError, Problem

OPEN_FILES = Problem(
    "communication.open_files",
    ClusterError,
    "workers: a process may open {limit} files here, and one of {workers} workers needs {wanted}, a connection to every other in each group",
    "raise the hard limit (ulimit -Hn, LimitNOFILE=), or use fewer workers",
    cause="every worker is connected with every other in two groups",
    advice="`ulimit -Hn`, `LimitNOFILE=` of the service, or fewer workers",
)

FOREIGN_CONNECTION = Problem(
    "communication.foreign_connection",
    ClusterError,
    "rank {rank} has a connection to {got} of {wanted} other ranks: another process has connected in the place of one",
    "resume the run, and look at who else uses this machine",
    cause="another program on the machine connected to a worker's port",
    advice="resume the run; look at who else uses the machine",
)
