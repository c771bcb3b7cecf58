"""What can be wrong with a spec's file and with overrides: each a row of docs/failures.md, and the line that is shown.

What is wrong with a field, pydantic finds; `messages` makes the line of it.
"""

from __future__ import annotations

from lockstep.errors import Problem, SpecError

SECRET_LEFT_OUT = Problem(
    "spec.secret_left_out",
    SpecError,
    "{field}: got {got}, which stands for a secret that a record does not keep",
    "give its value: {field}=…",
    shown="…: got '<redacted: …>', which stands for a secret that a record does not keep",
    cause="the spec is a run's `spec.yaml`, in whose place of a secret a mark stands",
    advice="give the value on the command line, or in the file",
)

UNREADABLE = Problem(
    "spec.unreadable",
    SpecError,
    "spec: cannot read {file!r}: {got}",
    cause="a folder, a file of another user, or a disk that fails",
    advice="follow the message",
)

MISSING = Problem(
    "spec.missing",
    SpecError,
    "spec: cannot read {file!r}: {got}",
    "{hint}",
    cause="there is no such file; one with a similar name is suggested",
    advice="follow the message; `lockstep init NAME` writes a spec with its job",
)

NOT_TEXT = Problem(
    "spec.not_text",
    SpecError,
    "spec: {file!r} is not text in UTF-8: {got}",
    cause="a file in another encoding, or another file",
    advice="save it in UTF-8",
)

TOO_LARGE = Problem(
    "spec.too_large",
    SpecError,
    "spec: {file!r} cannot be read: {got}",
    cause="a file that is larger than any spec",
    advice="name the spec",
)

NOT_YAML = Problem(
    "spec.not_yaml",
    SpecError,
    "{what} is not YAML: {got}",
    shown="spec: '…' is not YAML: line …",
    cause="a mistake at the line that the message names; also in an override",
    advice="follow the message",
)

EMPTY = Problem(
    "spec.empty",
    SpecError,
    "spec: {file!r} is empty",
    'name at least a job: {{use: "package.module:Class"}}',
    cause="a file without content",
    advice="name at least a job",
)

NO_MAPPING = Problem(
    "spec.no_mapping",
    SpecError,
    "spec: {file!r} holds {got}, wanted a mapping of fields",
    cause="a list or a text at the top of the file",
    advice="`field: value` on each line",
)

NO_OVERRIDE = Problem(
    "spec.no_override",
    SpecError,
    "override: got {got!r}, wanted key=value such as optimizer.lr=1e-3",
    cause="an override without `=`",
    advice="write `key=value`",
)

NO_FIELDS = Problem(
    "spec.no_fields",
    SpecError,
    "{field}: {section} is {got} and has no fields",
    "set {section} itself",
    shown="<key>: <section> is … and has no fields; set <section> itself",
    cause="an override below a field that is not a section",
    advice="set the field itself",
)

HALF_CHARACTER = Problem(
    "spec.half_character",
    SpecError,
    "{field}: got {got}, in which {half} is half a character, that no file and no store can hold",
    "write the character itself",
    cause="a text or a key with an escape such as `\\ud83d`, which is one of the two halves of a character in UTF-16, or the name of a file or folder that is not in UTF-8",
    advice="the character itself, or `\\U` with its eight digits; another name for the file or folder",
)

# --- places --------------------------------------------------------------------------------------------------

RECORD_FOLDER = Problem(
    "spec.record_folder",
    SpecError,
    "record.folder: got {got}, wanted a folder of the file system",
    "an object store is for checkpoint.storage",
    cause="a URI, such as that of an object store",
    advice="a path; `checkpoint.storage` may be an object store",
)

RECORD_NO_URI = Problem(
    "spec.record_no_uri",
    SpecError,
    "record.uri: got {got!r}, which is no URI of a store: {reason}",
    "wanted one such as http://host:5000, sqlite:///mlflow.db, or off",
    cause="a server whose host or port can be none, in the spec, with `--uri` or in `MLFLOW_TRACKING_URI`",
    advice="a host, and a port from 1 to 65535",
)

NO_HOME = Problem(
    "spec.no_home",
    SpecError,
    "path: got {got}, and this machine knows no home folder of that user",
    "wanted a path from the root on, or ./~…",
    cause="`~name` of a user whom this machine does not know",
    advice="a path from the root on",
)

LONG_PATH = Problem(
    "spec.long_path",
    SpecError,
    "path: got {got}, one of whose names has {bytes} bytes, and file systems take at most 255",
    "shorten it",
    cause="a folder or file whose name no file system takes",
    advice="a shorter name",
)

STORAGE_EMPTY = Problem(
    "spec.storage_empty",
    SpecError,
    "checkpoint.storage: got {got!r}, wanted a path or a URI",
    cause="`file://runs`, `s3:/bucket`, or a variable that is not set: checkpoints would lie elsewhere than it says",
    advice="follow the message",
)

STORAGE_KEY = Problem(
    "spec.storage.key",
    SpecError,
    "checkpoint.storage: got {got!r}: {reason}",
    "{remedy}",
    shown="checkpoint.storage: got '…': a key has a part that is empty, . or ..; …`, `checkpoint.storage: got '…': what follows # is no part of a key; …`, `checkpoint.storage: got '…': '…' stands for nothing in a URI; …",
    cause="a key that a store would take for another one, or that is no URI",
    advice="a key whose parts are names; `%23` for `#`, `%20` for a space",
)

STORAGE_SLASH = Problem(
    "spec.storage_slash",
    SpecError,
    "checkpoint.storage: got {got!r}, with one slash after the colon",
    "wanted {wanted}",
    cause="`file://runs`, `s3:/bucket`, or a variable that is not set: checkpoints would lie elsewhere than it says",
    advice="follow the message",
)

STORAGE_NO_URI = Problem(
    "spec.storage_no_uri",
    SpecError,
    "checkpoint.storage: got {got}, which is no URI: {reason}",
    cause="a URI that cannot be taken apart",
    advice="follow the message",
)

STORAGE_HOST = Problem(
    "spec.storage_host",
    SpecError,
    "checkpoint.storage: got {got!r}, a URI of another machine",
    "wanted a path such as {host}{path}, or file:///… with a path from the root on",
    cause="`file://runs`, `s3:/bucket`, or a variable that is not set: checkpoints would lie elsewhere than it says",
    advice="follow the message",
)

# --- schedules and sweeps ------------------------------------------------------------------------------------

DECAY_STEPS = Problem(
    "spec.decay_steps",
    SpecError,
    "schedule.decay_steps: got {got} after {warmup} of warm-up, wanted at most the {total} steps of the run together",
    "lower one of the two, or train longer",
    cause="the run is shorter than warm-up and decay together",
    advice="lower one of them, or train longer",
)

SPACE = Problem(
    "spec.space",
    SpecError,
    "space: {got}: {reason}",
    cause="a combination of the space gives no sound spec",
    advice="what the message says of the field",
)

POPULATION = Problem(
    "spec.population",
    SpecError,
    "space: {members}: {field}: got {got}, wanted {wanted} with scheduler=pbt, whose members take over states at the same steps",
    "leave it out of the space",
    cause="members of a population would have different lengths, or evaluate at different steps",
    advice="leave the field out of the space",
)
