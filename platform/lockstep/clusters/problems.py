"""What can be wrong with a cluster, and with the way to it: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ClusterError, Problem, SilentError, SpecError, StorageError

UNANSWERED = Problem(
    "cluster.unanswered",
    SilentError,
    "{whose} did not answer for {seconds} s",
    "{advice}",
    shown="… did not answer for … s",
    cause="a process of the run, of the sweep or of the cluster was stopped, or its node has come to a standstill; on Ray "
    "[another attempt](attempts.md) is tried first",
    advice="look at the driver's node, or at the head node for the job API; where the run or the sweep has ended, `lockstep resume`",
)

# --- which cluster is joined ------------------------------------------------------------------------------------

ADDRESS = Problem(
    "address.form",
    SpecError,
    "address: got {got!r}, wanted the host:port of a Ray head node such as 10.0.0.5:6379",
    cause="a wrong `--address` or `RAY_ADDRESS`",
    advice="leave it out for a new local cluster",
)

NO_CLUSTER_HERE = Problem(
    "address.auto",
    SpecError,
    "address: got 'auto', but no cluster was started on this machine",
    "give its host:port, or leave out --address for a new local one",
    cause="no cluster was started here, by `lockstep cluster up` or `ray start`",
    advice="leave it out for a new local cluster",
)

OTHER_CLUSTER = Problem(
    "address.other_cluster",
    SpecError,
    "address: got {got!r}, and this process is connected to {joined}",
    "leave address out to train there, or call ray.shutdown() first",
    cause="a call from a Python that has joined another cluster already",
    advice="follow the message",
)

UNDER_TORCHRUN = Problem(
    "address.torchrun",
    SpecError,
    "torchrun started this process, as rank {rank} of {ranks}, and each rank would begin a run of its own on Ray",
    "add --local to train as the ranks of torchrun, or give the command without it",
    cause="`lockstep train` under torchrun, without `--local`",
    advice="`torchrun … -m -- lockstep train SPEC --local`, or the command without torchrun",
)

NO_ANSWER = Problem(
    "address.no_answer",
    ClusterError,
    "address: no Ray cluster answers at {got} ({why})",
    "start one there, or leave out --address and RAY_ADDRESS for a new local one",
    cause="nothing listens there; reported within three seconds",
    advice="the address of a running cluster",
)

NO_HEAD_NODE = Problem(
    "address.no_head_node",
    ClusterError,
    "address: {got} accepts connections but {why}",
    "give the address of a running cluster, or leave out --address and RAY_ADDRESS for a new local one",
    cause="the cluster is dying, or the port is another program's; reported within ten seconds, also if the cluster dies while the command connects",
    advice="the address of a running cluster",
)

NOT_LET_IN = Problem(
    "address.not_let_in",
    ClusterError,
    "address: the cluster at {address} answers, but did not let this driver in within {seconds} s",
    "a driver needs a live node of the cluster on its own machine: look at ray status",
    cause="the cluster has no live node on the driver's machine",
    advice="`ray status`; start a node there, or send the run with `lockstep submit`",
)

NOT_CONNECTED = Problem(
    "ray.not_connected",
    ClusterError,
    "ray: cannot connect to {address}: {got}",
    cause="Ray refuses the connection, for example because versions of Ray or Python differ",
    advice="follow the message",
)

RAYLET_ENDED = Problem(
    "ray.raylet_ended",
    ClusterError,
    "ray: the raylet, Ray's process on this node, ended {times} times while the cluster was being started (exit code {got})",
    "nothing has begun: give the command again when the machine has less to do and more memory",
    cause="Ray ends its process on a node whose agent does not begin within 15 s; the command starts its cluster up to three times",
    advice="a machine with less load or more memory; then the same command",
)

# --- the cluster's own processes --------------------------------------------------------------------------------

CORE_GONE = Problem(
    "ray.core_gone",
    ClusterError,
    "ray: {part} {got}",
    "the workers are lost with it, and lockstep resume goes on",
    shown="ray: the raylet, Ray's process on this node, was ended by …; …`, `ray: the GCS, Ray's central process of the cluster, …",
    cause="a process of the cluster that the command had started was killed, often because memory ran out, or crashed; reported at "
    "once, by the driver or, if Ray ends that, by its guardian",
    advice="`lockstep resume` with the id of the run or the sweep; `error.txt` says where Ray's logs are",
)

CORE_SILENT = Problem(
    "ray.core_silent",
    ClusterError,
    "ray: {part} of the cluster at {address} {got}",
    shown="ray: … of the cluster at … has not answered for … s`, `ray: … of the cluster at … does not answer",
    cause="the same of a cluster that others have started: its head node is gone, or cannot be reached",
    advice="the cluster, then `lockstep resume RUN_ID`",
)

# --- a cluster on this machine ----------------------------------------------------------------------------------

OPEN = Problem(
    "cluster.open",
    SpecError,
    "host: {got!r} can be reached from other machines, and Ray runs any code that it receives",
    "drop --no-token, or listen on 127.0.0.1",
    cause="`cluster up --no-token` beyond loopback",
    advice="drop one of the two options",
)

CLUSTER_RUNS = Problem(
    "cluster.runs",
    SpecError,
    "cluster: one {got}",
    "stop it with lockstep cluster down",
    shown="cluster: one is already running at …; …`, `cluster: one is already being started; …",
    cause="`cluster up` was run twice",
    advice="`lockstep cluster down`",
)

NOT_STARTED = Problem(
    "cluster.not_started",
    ClusterError,
    "cluster: it did not start: {got}",
    cause="a node of `cluster up` failed",
    advice="follow the message",
)

NO_AGENTS = Problem(
    "cluster.no_agents",
    ClusterError,
    "the agents of its nodes did not start within {seconds} s, so it cannot accept jobs",
    "start it again; where it fails again, look at Ray's logs",
    cause="the machine is overloaded, or a package of `ray[default]` is missing",
    advice="`lockstep cluster up` again, when less runs here",
)

SECRET_UNWRITABLE = Problem(
    "cluster.secret_unwritable",
    StorageError,
    "{what}: cannot write {file!r}: {got}",
    "set XDG_STATE_HOME to a folder that you can write",
    shown="cluster_token: cannot write '…': …; …`, `mlflow_auth: cannot write '…': …; …",
    cause="the folder in which `cluster up` and `ui` keep their secrets is not writable",
    advice="set `XDG_STATE_HOME`",
)

STATE_UNREADABLE = Problem(
    "cluster.state_unreadable",
    StorageError,
    "cluster: cannot read {file!r}: {got}",
    "delete it once its cluster has ended",
    cause="the note of the cluster that runs here is damaged, or another user's",
    advice="delete it once its cluster has ended, or set `XDG_STATE_HOME`",
)

# --- nodes that leave -------------------------------------------------------------------------------------------

CANNOT_DRAIN = Problem(
    "leave.cannot_drain",
    ClusterError,
    "leave: this version of Ray cannot drain a node on request ({got})",
    "stop the runs that have workers here, which save first, then end the node with ray stop",
    cause="another version of Ray than those that Lockstep is tested with",
    advice="a version that Lockstep is tested with",
)

DRIVERS_ELSEWHERE = Problem(
    "leave.drivers_elsewhere",
    SpecError,
    "leave: got --stop-runs with --node {got}, and only the drivers on this machine can be told to end",
    "give it on the machine that leaves, without --node",
    cause="`leave --stop-runs` for another machine's node",
    advice="the command on that machine, without `--node`",
)

NO_LIVE_NODE = Problem(
    "leave.no_node",
    ClusterError,
    "leave: the cluster has no live node {got}",
    "look at ray list nodes",
    cause="the machine has no Ray node, or none has such an id",
    advice="`ray list nodes`",
)

NOT_DRAINED = Problem(
    "leave.not_drained",
    ClusterError,
    "leave: the cluster does not drain node {node}: {got}",
    cause="Ray refuses, as for the head node",
    advice="what Ray's answer says",
)

METADATA = Problem(
    "notices.metadata",
    SpecError,
    "metadata: got {got!r}, wanted the address of a metadata service such as http://169.254.169.254",
    cause="a wrong call of the agent",
    advice="follow the message",
)

CLOUD = Problem(
    "notices.cloud",
    SpecError,
    "cloud: got {got!r}, wanted aws or gcp",
    cause="a wrong call of the agent",
    advice="follow the message",
)

# --- sending a run to a cluster ---------------------------------------------------------------------------------

NO_ADDRESS = Problem(
    "submit.no_address",
    SpecError,
    "address: missing",
    "give --address http://host:8265, or start nodes here with lockstep cluster up",
    cause="`submit` found no cluster",
    advice="the dashboard's URL",
)

JOB_API_ADDRESS = Problem(
    "submit.address",
    SpecError,
    "address: got {got!r}, wanted the job API's URL such as http://127.0.0.1:8265",
    cause="`submit` got Ray's other address, or one without its scheme",
    advice="the dashboard's URL",
)

TOO_LARGE = Problem(
    "submit.too_large",
    SpecError,
    "submit: {folder!r} is too large for the job API, which takes {wanted} MiB: {got}",
    "list what the job does not need in .gitignore or .rayignore, and put data where all nodes can see them",
    cause="data or weights in the working directory",
    advice="list them in `.gitignore` or `.rayignore`",
)

SECRET_IN_NOTIFY = Problem(
    "submit.secret_in_notify",
    SpecError,
    "notify: contains a secret, which every process list on the cluster would show",
    "have the command read it from a file there",
    cause="the command of a [notification](cli.md#notifications) would show it",
    advice="follow the message",
)

PASSWORD_IN_OVERRIDE = Problem(
    "submit.password",
    SpecError,
    "{field}: contains a password, which every process list on the cluster would show",
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the cluster's nodes are started",
    shown="<field>: contains a password, which every process list on the cluster would show; …",
    cause="`submit` would put the override on a command line",
    advice="set the password in the environment of the cluster",
)

NO_SPEC_OR_RUN = Problem(
    "submit.no_spec",
    SpecError,
    "spec: cannot read {got!r}: there is no such file, and it is not a run id",
    "give the path of a spec below this folder, or the whole id of a run",
    cause="a misspelt file, or a part of an id",
    advice="follow the message",
)

SPEC_OUTSIDE = Problem(
    "submit.spec_outside",
    SpecError,
    "spec: {got!r} is not below {folder!r}, which is the folder sent with the job",
    "start in a folder above the spec",
    cause="a job is sent with the working directory",
    advice="start in a folder above the spec",
)

NO_JOB_TO_RETRY = Problem(
    "retries.no_job",
    SpecError,
    "retries: this command is not a cluster job, so nothing could start it again",
    "send the run with lockstep submit, or leave out --retries",
    cause="`--retries` outside a job",
    advice="follow the message",
)

NO_JOB = Problem(
    "submit.no_job",
    SpecError,
    "job: {address} has no job {got!r}",
    "ray job list --address {address} lists them",
    cause="a misspelled `submit --attach`, or the cluster was started anew",
    advice="follow the message",
)

JOB_GONE = Problem(
    "submit.job_gone",
    ClusterError,
    "job: {address} knows no job {job!r} any more, as a cluster that was started anew",
    "{again}",
    cause="the cluster was started anew while the job ran",
    advice="`lockstep submit RUN_ID` goes on with its run",
)

NO_JOB_API = Problem(
    "submit.no_job_api",
    ClusterError,
    "address: {address} does not answer like Ray's job API ({got})",
    "give the URL of the cluster's dashboard",
    cause="nothing, or another service, answers there",
    advice="the dashboard's URL",
)

NO_AGENT = Problem(
    "submit.no_agent",
    ClusterError,
    "address: {address} has no agent that accepts jobs",
    "another Ray cluster on its machine may use the port of its agent: start it with ray start --head --dashboard-agent-listen-port=0",
    cause="two Ray clusters on one machine: the agent of the second head finds its port taken",
    advice="`--dashboard-agent-listen-port=0`",
)

OTHER_TOKEN = Problem(
    "submit.other_token",
    ClusterError,
    "address: {address} expects another token than the one in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token",
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's",
    cause="no token, or the token of another cluster",
    advice="`RAY_AUTH_MODE=token` and `RAY_AUTH_TOKEN_PATH`",
)
