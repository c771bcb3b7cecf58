"""What a confined process can reach: nothing that it is judged by, and nobody else."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.proof import problems, sandbox
from lockstep.proof.sandbox import Sandbox
from tests.raised import raises

BACKENDS = [sandbox.namespaces, *([sandbox.bubblewrap] if shutil.which("bwrap") else [])]

LOOK = """
import ctypes, json, os, socket, sys
found = {"processes": [p for p in os.listdir("/proc") if p.isdigit()], "tmp": os.listdir("/tmp"), "wrote": []}
given = json.loads(sys.argv[1])
def tried(call, *what):
    try: return call(*what)
    except OSError as error: return type(error).__name__
found["seen"] = {path: tried(lambda: bool(os.listdir(path) if os.path.isdir(path) else open(path).read())) for path in given["read"]}
for path in given["write"]:
    try:
        open(path, "a").close(); found["wrote"].append(path)
    except OSError: pass
found["network"] = tried(socket.create_connection, ("127.0.0.1", given["port"]), 2)
with socket.socket() as own:
    own.bind(("127.0.0.1", 0)); own.listen(); socket.create_connection(own.getsockname()).close()
found["abstract"] = tried(socket.socket(socket.AF_UNIX).connect, "\\0" + given["abstract"])
found["status"] = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if line[:3] in ("Cap", "NoN"))
libc = ctypes.CDLL(None)
found["mounts"] = [libc.umount2(path.encode(), 2) for path in given["read"]] + [libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None)]
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    yield
    sandbox._backend.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda one: one.__name__)
def test_a_confined_process_sees_its_folder_and_nothing_that_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    monkeypatch.setattr(sandbox, "_backend", lambda: backend)
    monkeypatch.setattr(sandbox._backend, "cache_clear", lambda: None, raising=False)
    here, record = tmp_path / "here", tmp_path / "here" / "runs" / "run"
    record.mkdir(parents=True)
    (record / "ledger").write_text("secret")
    (here / "key.pem").write_text("secret")
    (here / "job.py").write_text("seen")
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "file").write_text("not seen")
    fresh = [f"{folder}/{uuid.uuid4().hex}" for folder in ("/tmp", "/dev/shm")]
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as abstract:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        abstract.bind(f"\0lockstep-{os.getpid()}")
        abstract.listen()
        asked = {
            "read": [str(here / "job.py"), str(record), str(here / "key.pem"), str(beside)],
            "write": [str(here / "x"), "/x", "/etc/x", str(Path(sys.prefix, "x")), *fresh],
            "port": listening.getsockname()[1],
            "abstract": f"lockstep-{os.getpid()}",
        }
        words = [sys.executable, "-c", LOOK, json.dumps(asked)]
        command = Sandbox(hidden=[record, here / "key.pem"]).command(words, here)
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["processes"]) <= 2
    assert found["seen"][str(here / "job.py")] is True
    assert [found["seen"][path] for path in asked["read"][1:]] == [
        False,
        found["seen"][str(here / "key.pem")],
        "FileNotFoundError",
    ]
    assert found["seen"][str(here / "key.pem")] in (False, "PermissionError")
    assert found["wrote"] == fresh
    assert not any(map(os.path.exists, fresh))
    assert found["network"] == found["abstract"] == "ConnectionRefusedError"
    status = found["status"]
    assert {status[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert set(found["mounts"]) == {-1}


def test_where_the_system_has_nothing_one_line_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox._backend.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(problems.NO_SANDBOX, got=re.compile("bubblewrap: ")):
        Sandbox().command([sys.executable], tmp_path)


def test_a_confined_process_gets_no_secret_and_no_way_to_other_programs() -> None:
    given = {
        "PATH": "/bin",
        "PYTHONHASHSEED": "0",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "SSH_AUTH_SOCK": "/home/me/agent",
        "MLFLOW_TRACKING_URI": "http://me:word@host",
    }
    assert sandbox.environment(given) == {"PATH": "/bin", "PYTHONHASHSEED": "0", "TMPDIR": "/tmp"}
