"""What can be wrong with the options of a command: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import Problem, SpecError

# --- checks and benches --------------------------------------------------------------------------------------

WORKER_COUNTS = Problem(
    "cli.worker_counts",
    SpecError,
    "workers: got {got!r}, wanted whole numbers between commas, such as 1,2,4",
    cause="a wrong `--workers`",
    advice="whole numbers between commas",
)

# --- clusters ------------------------------------------------------------------------------------------------

NOTICES = Problem(
    "cli.notices",
    SpecError,
    "notices: --cloud and --metadata belong together",
    "give both, or neither to react to SIGTERM alone",
    cause="a wrong call of the agent",
    advice="follow the message",
)

SPEC_OR_JOB = Problem(
    "cli.spec_or_job",
    SpecError,
    "submit: wanted either a SPEC or --attach JOB",
    cause="`submit` without a SPEC and without `--attach`, or with both",
    advice="one of the two",
)

# --- training again ------------------------------------------------------------------------------------------

RETRIES_NAME = Problem(
    "cli.retries_name",
    SpecError,
    "retries: a run that is started again is found by its name",
    "give it one with --run",
    cause="`--retries` outside a job, without `--run`, or with `--fork`",
    advice="follow the message",
)

RETRIES_FORK = Problem(
    "cli.retries_fork",
    SpecError,
    "retries: a fork that is started again would be another run",
    "leave out --retries, then resume it",
    cause="`--retries` outside a job, without `--run`, or with `--fork`",
    advice="follow the message",
)

WITHOUT_CHECKPOINT = Problem(
    "cli.without_checkpoint",
    SpecError,
    "without: chooses the checkpoint itself and starts a new run",
    "leave out --from-step and --takeover",
    cause="`--without` with `--from-step` or `--takeover`",
    advice="leave them out",
)

# --- proofs --------------------------------------------------------------------------------------------------

STATEMENT_SHARE = Problem(
    "cli.statement_share",
    SpecError,
    "statement: a random share of the run is trained again",
    "leave out --from, --steps and --all",
    cause="`verify --statement` with `--from`, `--steps` or `--all`",
    advice="leave them out",
)

NOTHING_TO_VERIFY = Problem(
    "cli.nothing_to_verify",
    SpecError,
    "verify: wanted the id of a run, or --statement FILE with --key PUB",
    cause="`verify` without a run and without a statement",
    advice="one of the two",
)

GUARD_BASE = Problem(
    "cli.guard_base",
    SpecError,
    "guard: wanted --base REV, the commit to compare with, such as --base HEAD~1",
    cause="`guard` without `--base`",
    advice="the commit to compare with",
)

# --- records -------------------------------------------------------------------------------------------------

LIMIT = Problem(
    "cli.limit",
    SpecError,
    "limit: got {got}, wanted from 1 to 1000",
    cause="a wrong `--limit`",
    advice="a number in that range",
)

NO_STORAGE = Problem(
    "cli.no_storage",
    SpecError,
    "storage: there is no folder {folder!r}",
    "name the one that contains the run folders",
    cause="a wrong `--storage`",
    advice="the folder that contains the run folders",
)

SHOW_KEYS = Problem(
    "cli.show_keys",
    SpecError,
    "show: got {got!r} after the run",
    "keys are for --plot",
    cause="a view of what is not recorded, or a key without `--plot`",
    advice="a run with steps; one of its keys",
)

COMPARED_RUNS = Problem(
    "cli.compared_runs",
    SpecError,
    "compare: got {got} run{plural}, wanted from 2 to {most}",
    "`lockstep show RUN --plot` draws one",
    cause="one run, or too many",
    advice="from 2 runs on; `lockstep show` for one",
)

PORT_TAKEN = Problem(
    "cli.port_taken",
    SpecError,
    "serve: port {got} of loopback cannot be taken: {reason}",
    "name another one, or --serve 0 for a free one",
    shown="serve: port … of loopback cannot be taken: …; …",
    cause="another process listens there, or the port needs more rights",
    advice="another port, or `--serve 0`",
)
