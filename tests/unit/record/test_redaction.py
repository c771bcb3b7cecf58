"""What looks like a secret is not recorded; what is none stays, above all in a diff."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.calls.continuation import refuse_changes
from lockstep.errors import SpecError
from lockstep.record import redaction
from lockstep.record.events.union import Failed, Printed, Started
from lockstep.record.recorder import Recorder
from lockstep.record.redaction import redacted, redacted_document, redacted_fields
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec
from tests.distributed.small_jobs import Plain
from tests.unit.record.regex_steps import Counted

HEX = "0123456789abcdef" * 4
TOKENS = {
    "AWS Access Key": "AKIA" + "IOSFODNN7EXAMPLE",
    "GitHub Token": "ghp_" + "a1B2" * 9,
    "Hugging Face Token": "hf_" + "aBcD" * 8 + "xy",
    "Slack Token": "xoxb-123456789012-123456789012-" + "abcdefGHIJ12" * 2,
    "Stripe Access Key": "sk_live_" + "abcd1234" * 3,
    "OpenAI Token": "sk-proj-" + "a1B2" * 10,
    "Google API Key": "AIza" + "B1c2D" * 7,
    "JSON Web Token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dBjftJeZ4CVP",
}


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_replaced_by_a_mark_that_names_it(kind: str) -> None:
    token = TOKENS[kind]
    shown = redacted(f"+    login('{token}')  # step 1\nloss 0.5\n")
    assert token not in shown
    assert shown == f"+    login('<redacted: {kind}>')  # step 1\nloss 0.5\n"
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('password = "hunter2"', 'password = "<redacted: Secret Keyword>"'),
        ("{'api_key': 'abcdef123'}", "{'api_key': '<redacted: Secret Keyword>'}"),
        ("export WANDB_API_KEY=0123456789abcdef", "export WANDB_API_KEY=<redacted: Secret Keyword>"),
        ('password = "hun***ter2secret"', 'password = "<redacted: Secret Keyword>"'),
        ('password = "hunter2secret<redacted: x>"', 'password = "<redacted: Secret Keyword>"'),
        ("export WANDB_API_KEY=0123456789***", "export WANDB_API_KEY=<redacted: Secret Keyword>"),
        ("+HF_TOKEN=abc", "+HF_TOKEN=<redacted: Secret Keyword>"),
        (
            'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"',
            'aws_secret_access_key = "<redacted: AWS Access Key>"',
        ),
        ("connect('postgres://me:p/w@db/x')", "connect('postgres://me:***@db/x')"),
    ],
)
def test_the_value_of_a_secrets_name_is_replaced(given: str, shown: str) -> None:
    assert redacted(given) == shown
    assert redacted(shown) == shown


def test_a_private_key_is_replaced_as_a_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA75\nabc\n-----END RSA PRIVATE KEY-----"
    assert redacted(f"+a\n{key}\n+b\n") == "+a\n<redacted: Private Key>\n+b\n"
    assert redacted(f"+a\n{key[:50]}") == "+a\n<redacted: Private Key>"


@pytest.mark.parametrize(
    "text",
    [
        "index 3f4e5a6b7c..0a1b2c3d4e 100644",
        f"weights_digest {HEX}",
        f'"identity": "{HEX}"',
        "-    token = '<eos>'",
        "+    def login(self, password: str, key: bytes) -> None:",
        "+    secret = read_secret(path)",
        "+    api_key=os.environ['WANDB_API_KEY'],",
        "token_count = 128, key=lambda row: row.step",
        "keys = sorted(batch)  # the key of each sample",
        "step 120 loss 0.0123 lr 0.001",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_a_word_as_long_as_a_file_is_read_once() -> None:
    """Where each of its letters were read as the start of a URI, this would take minutes, and the recorder with it."""
    word = "x" * 200_000
    assert redacted(f"{word}://me:pa55@host/db") == f"{word}://me:***@host/db"


@pytest.mark.scenario
def test_the_sources_of_this_project_have_none() -> None:
    """The control: a diff of some twenty thousand lines loses nothing but what names a password on purpose."""
    changed = []
    for path in sorted(Path("platform/lockstep").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = zip(text.splitlines(), redacted(text).splitlines(), strict=True)
        changed += [one for one, other in lines if one != other and "://" not in one]
    assert changed == []


def test_a_document_is_redacted_by_names_and_values() -> None:
    token = TOKENS["Hugging Face Token"]
    document = {"job": {"params": {"api_key": "abcdef", "hub": token, "width": 3, "data": ["a", token]}}}
    shown = redacted_document(document)
    mark = "<redacted: Hugging Face Token>"
    assert shown == {
        "job": {
            "params": {"api_key": "<redacted: Secret Keyword>", "hub": mark, "width": 3, "data": ["a", mark]}
        }
    }
    assert redacted_fields(shown) == ["job.params.api_key", "job.params.hub", "job.params.data"]


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("<redacted: GitHub Token>", True),
        ("s3://***@bucket/runs", True),
        ("postgresql://me:***@host/db", True),
        ("http://host/?a=1&token=***", True),
        ("http://host/?token=***&a=1", True),
        ("a *** b", False),
        ("***", False),
        ("rated ***@home", False),
        ("http://host/?stars=****", False),
    ],
)
def test_stars_stand_for_a_secret_in_a_uri_alone(text: str, left_out: bool) -> None:
    """Elsewhere they are a text of the job's, with which a run is resumed."""
    assert redacted_fields({"a": text}) == ["a"] * left_out


def test_nothing_recorded_of_a_run_has_a_secret(spec: Callable[..., Spec], tmp_path: Path) -> None:
    """Diff, environment, params, error, traceback, and what a worker prints, even in two parts."""
    token, source = TOKENS["Hugging Face Token"], tmp_path / "source"
    source.mkdir()
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):  # fmt: skip
        if words == ["add", "."]:
            (source / "job.py").write_text("x = 1\n")
        subprocess.run(["git", *words], cwd=source, check=True)
    (source / "job.py").write_text(f"x = 2\nlogin('{token}')\n")
    job = {"use": "jobs.digits.job:Digits", "params": {"hub": token}}
    recorder = Recorder(spec(job=job), source=source)
    recorder.start()
    folder = recorder.run_folder()
    recorder.tell(
        Started({"identity": "abc", "environment": {"variables": {"HF_TOKEN": token}}, "fields": {"job.params.hub": token}}),
        Printed("attempt-1-rank-0-stdout", f"step 1\nmy token is {token[:9]}"),
        Printed("attempt-1-rank-0-stdout", f"{token[9:]}\nstep 2"),
        Failed(f"cannot log in with {token}", f"Traceback …\n  login('{token}')\n"),
    )  # fmt: skip
    recorder.close()
    everything = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path.name for path, content in everything.items() if token.encode() in content] == []
    texts = {path.name: content.decode() for path, content in everything.items()}
    mark = "<redacted: Hugging Face Token>"
    assert f"+login('{mark}')" in texts["git.diff"] and "+x = 2" in texts["git.diff"]
    assert texts["attempt-1-rank-0-stdout.txt"] == f"step 1\nmy token is {mark}\nstep 2"
    assert mark in texts["error.txt"] and mark in texts["run.json"]


class FromHub(Plain):
    """A job whose data are fetched with a token."""

    class Params(Plain.Params):
        hub: str = ""

    params: Params


def test_a_resume_asks_for_a_secret_that_the_record_has_not() -> None:
    """And takes it: whether it is the same, the identity in the checkpoint tells."""
    use, token = f"{__name__}:FromHub", TOKENS["Hugging Face Token"]
    given = load_spec({"job": {"use": use, "params": {"hub": token, "width": 8}}})
    recorded = load_spec(redacted_document(given.document()))
    with pytest.raises(SpecError, match=r"job\.params\.hub of run r1 .* give it again: job\.params\.hub=…"):
        refuse_changes("r1", recorded, recorded)
    refuse_changes("r1", recorded, given)
    other = load_spec({"job": {"use": use, "params": {"hub": token, "width": 9}}})
    with pytest.raises(SpecError, match=r"job\.params\.width is 8"):
        refuse_changes("r1", recorded, other)


def test_the_detectors_are_imported_by_whoever_records_alone() -> None:
    """A third of a second that no command waits for at its start."""
    code = "import sys, lockstep.cli.main, lockstep.record.redaction; print('detect_secrets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- how much work it is ----------------------------------------------------------------------------------

REPEATED = [
    "api_key", "api_key ", "password=", "password=`a", 'password="x,', '"a"==', '"a ', "eyJ", "eyJ-", "eyJ.", "//", "//.", "sk-", "TOKEN",
    "TOKEN_", "key= ", "xoxb-1-", "AKC1", "-----BEGIN ", "a:b@", "://", "aws key ",
]  # fmt: skip
BEGUN = ["", "ibm_key", "cl_key ", "api_key", "softlayer_key", "//", "//x/:_authToken="]


def patterns() -> list[re.Pattern[str]]:
    return [
        *(pattern for _, pattern in redaction._patterns()),
        *redaction._named_values(),
        redaction._ENVIRONMENT,
        redaction._PRIVATE_KEY,
    ]


def work(pattern: re.Pattern[str], text: str) -> int:
    counted = Counted(pattern)
    assert counted.spans(text) == [found.span() for found in pattern.finditer(text)]
    return counted.steps


def growth(pattern: re.Pattern[str], begun: str, repeated: str, size: int = 100) -> float:
    """How many times the work four times the text is; 16 for an expression that takes quadratic time."""
    few, many = (begun + repeated * (length // len(repeated)) for length in (size, 4 * size))
    return work(pattern, many) / work(pattern, few)


@pytest.mark.parametrize("repeated", [*REPEATED, " "])
def test_four_times_the_text_is_four_times_the_work(repeated: str) -> None:
    """Counted, not timed: what an expression begins with, again and again, and blanks after a name."""
    for pattern in patterns():
        for begun in BEGUN if repeated == " " else [""]:
            assert growth(pattern, begun, repeated) < 6, pattern.pattern


@pytest.mark.scenario
def test_the_count_finds_what_is_quadratic() -> None:
    """The expressions as the package has them."""
    from detect_secrets.plugins.ibm_cloud_iam import IbmCloudIamDetector
    from detect_secrets.plugins.jwt import JwtTokenDetector
    from detect_secrets.plugins.npm import NpmDetector

    for detector, begun, repeated in (
        (JwtTokenDetector, "", "eyJ"),
        (NpmDetector, "", "//"),
        (IbmCloudIamDetector, "ibm_key", " "),
    ):
        assert growth(detector.denylist[0], begun, repeated, size=15) > 10


@pytest.mark.scenario
def test_no_group_is_repeated_possessively() -> None:
    """Python before 3.11.5 finds nothing by such an expression where the group looks ahead: each secret would be recorded. An atomic group says the same."""
    package = Path(redaction.__file__).parents[1]
    repeated = re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+")
    assert repeated.search("(?:(?!a)b)*+") and repeated.search("(?:ab){1,2}+")
    assert [
        file.name
        for file in package.rglob("*.py")
        if any(repeated.search(part) for part in _patterns(file.read_text()))
    ] == []


def _patterns(text: str) -> list[str]:
    """The texts of a source file."""
    nodes = ast.walk(ast.parse(text))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
