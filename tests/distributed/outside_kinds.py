"""Kinds of inputs that no spec names: what a job takes from its process and machine, how each is changed between two attempts, and how that is told.

A job takes its value early (while it is imported, unless a kind says otherwise) and computes with it in step 4 only. So neither the initial weights nor the
first micro-batch show it.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import importlib.util
import io
import json
import locale
import math
import os
import pickle
import random
import shutil
import site
import socket
import sqlite3
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

Change = Callable[[Path, pytest.MonkeyPatch], object]

JOB = """
import os, sys
from pathlib import Path
import torch
from torch import nn
import lockstep

HERE = Path(__file__).parent
TAKEN = []
{at_import}

class Data(torch.utils.data.Dataset):
    def __init__(self): self.parent = os.getppid()
    def __len__(self): return 16
    def __getitem__(self, i):
        {in_fetch}
        return torch.full((4,), float(i)) / 16

class Mine(lockstep.Job):
    def __init__(self, params):
        super().__init__(params)
        {in_init}
    def model(self):
        {in_model}
        return nn.Linear(4, 4)
    def train_data(self):
        {in_data}
        return Data()
    def loss(self, model, batch):
        late = float(batch.sum()) > 6
        {in_loss}
        scale = float(TAKEN[-1]) if late and TAKEN else 1.0
        return lockstep.Loss(model(batch).square().sum() * scale, len(batch))
"""

PLACES = ("at_import", "in_init", "in_model", "in_data", "in_fetch", "in_loss")


class Kind(NamedTuple):
    """One kind: the code that takes the value, the change, and a pattern of what is told of it."""

    code: str
    change: Change
    told: str
    before: Change = lambda project, patch: None
    where: str = "at_import"
    shows: bool = True
    """Whether the value that the job takes differs in the test's own process."""


def source(code: str, where: str = "at_import") -> str:
    """The module of a job that runs `code` in one of its places."""
    filled = dict.fromkeys(PLACES, "pass") | {
        where: code.replace("\n", "\n" + " " * (8 if where != "at_import" else 0))
    }
    return JOB.format(**filled)


# --- changes ----------------------------------------------------------------------------------------------------


def text(name: str, value: str) -> Change:
    return lambda project, patch: (project / name).write_text(value)


def content(name: str, value: bytes) -> Change:
    return lambda project, patch: (project / name).write_bytes(value)


def variable(name: str, value: str) -> Change:
    return lambda project, patch: patch.setenv(name, value)


def both(*changes: Change) -> Change:
    def change(project: Path, patch: pytest.MonkeyPatch) -> None:
        for each in changes:
            each(project, patch)

    return change


def _array(value: float) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(value))
    return file.getvalue()


def _tensor(value: float) -> bytes:
    file = io.BytesIO()
    torch.save(torch.tensor(value), file)
    return file.getvalue()


def _zipped(name: str, value: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), value)
    return file.getvalue()


def _tarred(name: str, value: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(value)
        archive.addfile(entry, io.BytesIO(value.encode()))
    return file.getvalue()


def _big(value: int) -> Change:
    def change(project: Path, patch: pytest.MonkeyPatch) -> None:
        with (project / "project" / "big.bin").open("wb") as file:
            file.truncate(20 << 20)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([value]))

    return change


def _database(value: float) -> Change:
    def change(project: Path, patch: pytest.MonkeyPatch) -> None:
        (project / "project" / "scales.db").unlink(missing_ok=True)
        connection = sqlite3.connect(project / "project" / "scales.db")
        connection.execute("create table scales (value real)")
        connection.execute("insert into scales values (?)", (value,))
        connection.commit()
        connection.close()

    return change


def _folder(*names: str) -> Change:
    def change(project: Path, patch: pytest.MonkeyPatch) -> None:
        (project / "listed").mkdir(exist_ok=True)
        for name in names:
            (project / "listed" / name).write_text("")

    return change


def _patched(holder: object, name: str, value: object) -> Change:
    return lambda project, patch: patch.setattr(holder, name, value)


def _twice(function: Callable[..., object]) -> Callable[..., object]:
    return lambda *args, **more: function(*args, **more)


def _print_options(project: Path, patch: pytest.MonkeyPatch) -> None:
    options = np.get_printoptions()
    patch.setattr(np, "_lockstep_undo", None, raising=False)
    np.set_printoptions(precision=2)
    _UNDO.append(lambda: np.set_printoptions(**{k: v for k, v in options.items() if k != "override_repr"}))


def _torch_options(project: Path, patch: pytest.MonkeyPatch) -> None:
    torch.set_printoptions(precision=1)
    _UNDO.append(lambda: torch.set_printoptions(profile="default"))


def _undone(do: Callable[[], object], undo: Callable[[], object]) -> Change:
    def change(project: Path, patch: pytest.MonkeyPatch) -> None:
        _UNDO.append(undo)
        do()

    return change


_UNDO = list[Callable[[], object]]()


def undo() -> None:
    """Put back what changes have set in the process."""
    while _UNDO:
        _UNDO.pop()()


def _affinity(project: Path, patch: pytest.MonkeyPatch) -> None:
    every = os.sched_getaffinity(0)
    _UNDO.append(lambda: os.sched_setaffinity(0, every))
    os.sched_setaffinity(0, set(list(every)[:1]))


def _zone(name: str) -> Change:
    def change(project: Path, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("TZ", name)
        time.tzset()
        _UNDO.append(time.tzset)

    return change


def _umask(project: Path, patch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o077)
    _UNDO.append(lambda: os.umask(before))


def _new_folder(project: Path, patch: pytest.MonkeyPatch) -> None:
    (project / "a longer name").mkdir()
    patch.chdir(project / "a longer name")


def _pth(project: Path, patch: pytest.MonkeyPatch) -> None:
    folders = [*site.getsitepackages(), str(project / "site-packages")]
    patch.setattr(site, "getsitepackages", lambda: folders)
    (project / "site-packages" / "extra.pth").write_text("import sys; sys.extra_scale = 2.5\n")


def _module(name: str, value: float) -> Change:
    return text(name, f"SCALE = {value}\n")


WHOLE = r"variable\.MY_SCALE|copies the whole environment"
ENV = variable("MY_SCALE", "1.5"), variable("MY_SCALE", "2.5")
CONFIG = "project/config.json"


def whole(code: str) -> Kind:
    return Kind(code, ENV[1], WHOLE, before=ENV[0])


def beside(
    code: str,
    before: bytes,
    after: bytes,
    name: str = "config.json",
    told: str = "",
    where: str = "at_import",
) -> Kind:
    return Kind(
        code,
        content(f"project/{name}", after),
        told or rf"file\.{name}",
        before=content(f"project/{name}", before),
        where=where,
    )


def asked(code: str, change: Change, told: str, before: Change = lambda project, patch: None) -> Kind:
    return Kind(code, change, told, before)


CODE_1, CODE_2 = b"TAKEN.append(1.5)\n", b"TAKEN.append(2.5)\n"

KINDS: dict[str, Kind] = {
    # --- the environment
    "a variable by its name": Kind("TAKEN.append(os.environ['MY_SCALE'])", ENV[1], r"variable\.MY_SCALE", before=ENV[0]),
    "a variable by getenv": Kind("TAKEN.append(os.getenv('MY_SCALE'))", ENV[1], r"variable\.MY_SCALE", before=ENV[0]),
    "a variable by expandvars": Kind("TAKEN.append(os.path.expandvars('$MY_SCALE'))", ENV[1], r"variable\.MY_SCALE", before=ENV[0]),
    "dict(environ)": whole("TAKEN.append(dict(os.environ)['MY_SCALE'])"),
    "unpacked environ": whole("TAKEN.append({**os.environ}['MY_SCALE'])"),
    "environ.copy": whole("TAKEN.append(os.environ.copy()['MY_SCALE'])"),
    "environ.items": whole("TAKEN.extend(value for name, value in os.environ.items() if name == 'MY_SCALE')"),
    "environ.values": whole("TAKEN.extend(value for value in os.environ.values() if value in ('1.5', '2.5'))"),
    "environ united": whole("TAKEN.append((os.environ | {'MORE': '1'})['MY_SCALE'])"),
    "environb.copy": whole("TAKEN.append(os.environb.copy()[b'MY_SCALE'].decode())"),
    "repr(environ)": whole("import re; TAKEN.append(re.search(r\"'MY_SCALE': '(.*?)'\", repr(os.environ))[1])"),
    "posix.environ": Kind(
        "import posix; TAKEN.append(posix.environ[b'MY_SCALE'].decode())",
        lambda project, patch: patch.setitem(__import__("posix").environ, b"MY_SCALE", b"2.5"),
        WHOLE,
        before=both(ENV[0], lambda project, patch: patch.setitem(__import__("posix").environ, b"MY_SCALE", b"1.5")),
    ),
    "a copy in model": Kind("TAKEN.append(dict(os.environ)['MY_SCALE'])", ENV[1], WHOLE, before=ENV[0], where="in_model"),
    "a copy for another program": Kind(
        "import subprocess; TAKEN.append(subprocess.check_output(['sh', '-c', 'echo $MY_SCALE'], env={**os.environ}))", ENV[1], WHOLE, before=ENV[0]
    ),
    # --- files beside the job
    "json": beside("import json; TAKEN.append(json.load(open(HERE / 'config.json')))", b"1.5", b"2.5"),
    "a path's text": beside("TAKEN.append((HERE / 'config.json').read_text())", b"1.5", b"2.5"),
    "a path's bytes": beside("TAKEN.append((HERE / 'config.json').read_bytes())", b"1.5", b"2.5"),
    "a relative name": Kind(
        "TAKEN.append(open('config.json').read())",
        text(CONFIG, "2.5"),
        r"file\.config\.json",
        before=both(text(CONFIG, "1.5"), lambda project, patch: patch.chdir(project / "project")),
    ),
    "npy": beside("import numpy; TAKEN.append(float(numpy.load(HERE / 'config.npy')))", _array(1.5), _array(2.5), "config.npy"),
    "loadtxt": beside("import numpy; TAKEN.append(float(numpy.loadtxt(HERE / 'config.txt')))", b"1.5", b"2.5", "config.txt"),
    "fromfile": beside("import numpy; TAKEN.append(float(numpy.fromfile(HERE / 'config.bin', 'u1')[0]))", b"\1", b"\2", "config.bin"),
    "memmap": beside("import numpy; TAKEN.append(float(numpy.memmap(HERE / 'config.bin', 'u1', 'r')[0]))", b"\1", b"\2", "config.bin"),
    "torch.load": beside("TAKEN.append(float(torch.load(HERE / 'config.pt')))", _tensor(1.5), _tensor(2.5), "config.pt"),
    "yaml": beside("import yaml; TAKEN.append(yaml.safe_load((HERE / 'config.yaml').open()))", b"1.5", b"2.5", "config.yaml"),
    "csv": beside("import csv; TAKEN.append(next(csv.reader(open(HERE / 'scales.csv')))[0])", b"1.5,0\n", b"2.5,0\n", "scales.csv"),
    "gzip": beside(
        "import gzip; TAKEN.append(gzip.open(HERE / 'scale.gz').read())", __import__("gzip").compress(b"1.5"), __import__("gzip").compress(b"2.5"), "scale.gz"
    ),
    "pickle": beside("import pickle; TAKEN.append(pickle.load(open(HERE / 'scale.pkl', 'rb')))", pickle.dumps(1.5), pickle.dumps(2.5), "scale.pkl"),
    "configparser": beside(
        "import configparser; c = configparser.ConfigParser(); c.read(HERE / 'scale.ini'); TAKEN.append(c['a']['b'])",
        b"[a]\nb = 1.5\n",
        b"[a]\nb = 2.5\n",
        "scale.ini",
    ),
    "tomllib": beside("import tomllib; TAKEN.append(tomllib.load(open(HERE / 'scale.toml', 'rb'))['a'])", b"a = 1.5", b"a = 2.5", "scale.toml"),
    "os.open": beside("TAKEN.append(os.read(os.open(HERE / 'config.json', os.O_RDONLY), 9))", b"1.5", b"2.5"),
    "io.open": beside("import io; TAKEN.append(io.open(HERE / 'config.json').read())", b"1.5", b"2.5"),
    "codecs.open": beside("import codecs; TAKEN.append(codecs.open(HERE / 'config.json', encoding='utf-8').read())", b"1.5", b"2.5"),
    "fileinput": beside("import fileinput; TAKEN.extend(fileinput.input([HERE / 'config.json']))", b"1.5", b"2.5"),
    "linecache": beside("import linecache; linecache.clearcache(); TAKEN.append(linecache.getline(str(HERE / 'config.json'), 1))", b"1.5\n", b"2.5\n"),
    "pkgutil": beside("import pkgutil; TAKEN.append(pkgutil.get_data(__name__, 'config.json'))", b"1.5", b"2.5"),
    "zipfile": beside(
        "import zipfile; TAKEN.append(zipfile.ZipFile(HERE / 'scale.zip').read('a'))", _zipped("a", "1.5"), _zipped("a", "2.5"), "scale.zip"
    ),
    "tarfile": beside(
        "import tarfile; TAKEN.append(tarfile.open(HERE / 'scale.tar').extractfile('a').read())", _tarred("a", "1.5"), _tarred("a", "2.5"), "scale.tar"
    ),
    "sqlite": Kind(
        "import sqlite3; TAKEN.append(sqlite3.connect(HERE / 'scales.db').execute('select value from scales').fetchone()[0])",
        _database(2.5),
        r"file\.scales\.db",
        before=_database(1.5),
    ),
    "mmap": beside(
        "import mmap\nwith open(HERE / 'config.json', 'rb') as f: TAKEN.append(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:3])", b"1.5", b"2.5"
    ),
    "a link": Kind(
        "TAKEN.append((HERE / 'link.json').read_text())",
        text("outside.json", "2.5"),
        r"file\.link\.json",
        before=both(text("outside.json", "1.5"), lambda project, patch: (project / "project" / "link.json").symlink_to(project / "outside.json")),
    ),
    "a file of 20 MB": Kind("TAKEN.append((HERE / 'big.bin').read_bytes()[-1])", _big(2), r"file\.big\.bin", before=_big(1)),
    "in __init__": beside("TAKEN.append((HERE / 'config.json').read_text())", b"1.5", b"2.5", where="in_init"),
    "in model": beside("TAKEN.append((HERE / 'config.json').read_text())", b"1.5", b"2.5", where="in_model"),
    "in train_data": beside("TAKEN.append((HERE / 'config.json').read_text())", b"1.5", b"2.5", where="in_data"),
    "in fetch": beside("TAKEN.append((HERE / 'config.json').read_text())", b"1.5", b"2.5", where="in_fetch"),
    "in loss": beside("TAKEN.append((HERE / 'config.json').read_text())", b"1.5", b"2.5", where="in_loss"),
    "a file that was not there": Kind(
        "try: TAKEN.append((HERE / 'override.json').read_text())\nexcept OSError: TAKEN.append(1.5)", text("project/override.json", "2.5"), r"file\.override\.json"
    ),
    "a file that is looked for": Kind(
        "TAKEN.append((HERE / 'override.json').read_text() if (HERE / 'override.json').exists() else 1.5)",
        text("project/override.json", "2.5"),
        r"file\.override\.json",
    ),
    "a file that is gone": Kind(
        "TAKEN.append((HERE / 'override.json').read_text() if (HERE / 'override.json').exists() else 1.5)",
        lambda project, patch: (project / "project" / "override.json").unlink(),
        r"file\.override\.json is not there",
        before=text("project/override.json", "2.5"),
    ),
    # --- files elsewhere
    "elsewhere": Kind("TAKEN.append((HERE.parent / 'vocabulary.txt').read_text())", text("vocabulary.txt", "2.5"), r"vocabulary\.txt", before=text("vocabulary.txt", "1.5")),
    "elsewhere in fetch": Kind(
        "TAKEN.append((HERE.parent / 'vocabulary.txt').read_text())", text("vocabulary.txt", "2.5"), r"vocabulary\.txt", before=text("vocabulary.txt", "1.5"), where="in_fetch"
    ),
    "hidden": beside("TAKEN.append((HERE / '.env').read_text())", b"1.5", b"2.5", ".env"),
    "proc": Kind(
        "TAKEN.append(float(len(open('/proc/self/comm').read())))",
        lambda project, patch: (Path("/proc/self/comm").write_text("other-name"), _UNDO.append(lambda: Path("/proc/self/comm").write_text("python"))),
        r"/proc/self/comm",
    ),
    # --- listings
    "listdir": asked("TAKEN.append(len(os.listdir(HERE.parent / 'listed')))", _folder("c"), r"folder\.\S*listed", _folder("a", "b")),
    "scandir": asked("TAKEN.append(len(list(os.scandir(HERE.parent / 'listed'))))", _folder("c"), r"folder\.\S*listed", _folder("a", "b")),
    "walk": asked("TAKEN.append(len(next(os.walk(HERE.parent / 'listed'))[2]))", _folder("c"), r"folder\.\S*listed", _folder("a", "b")),
    "glob": asked("import glob; TAKEN.append(len(glob.glob(str(HERE.parent / 'listed' / '*'))))", _folder("c"), r"folder\.\S*listed", _folder("a", "b")),
    "iterdir": asked("TAKEN.append(len(list((HERE.parent / 'listed').iterdir())))", _folder("c"), r"folder\.\S*listed", _folder("a", "b")),
    "rglob": asked("TAKEN.append(len(list((HERE.parent / 'listed').rglob('*'))))", _folder("c"), r"folder\.\S*listed", _folder("a", "b")),
    # --- code
    "exec": beside("exec((HERE / 'more.txt').read_text())", CODE_1, CODE_2, "more.txt"),
    "compile": beside("exec(compile(open(HERE / 'more.txt').read(), 'more', 'exec'))", CODE_1, CODE_2, "more.txt"),
    "runpy": beside("import runpy; runpy.run_path(str(HERE / 'more.txt'), {'TAKEN': TAKEN})", CODE_1, CODE_2, "more.txt"),
    "zip import": Kind(
        "sys.path.append(str(HERE.parent / 'lib.zip')); import zipped_of_outside; TAKEN.append(zipped_of_outside.SCALE)",
        content("lib.zip", _zipped("zipped_of_outside.py", "SCALE = 2.5")),
        r"lib\.zip",
        before=content("lib.zip", _zipped("zipped_of_outside.py", "SCALE = 1.5")),
    ),
    "namespace package": Kind(
        "import spaced_of_outside.part; TAKEN.append(spaced_of_outside.part.SCALE)",
        _module("elsewhere/spaced_of_outside/part.py", 2.5),
        r"job\.source\.spaced_of_outside/part\.py",
        before=both(lambda project, patch: (project / "elsewhere" / "spaced_of_outside").mkdir(), _module("elsewhere/spaced_of_outside/part.py", 1.5)),
    ),
    "editable install": Kind(
        "import editable_of_outside; TAKEN.append(editable_of_outside.SCALE)",
        _module("elsewhere/editable_of_outside.py", 2.5),
        r"job\.source\.editable_of_outside\.py",
        before=_module("elsewhere/editable_of_outside.py", 1.5),
    ),
    "a value of a module by a computed name": Kind(
        "import importlib; TAKEN.append(importlib.import_module('editable_of_' + 'outside').SCALE)",
        _module("elsewhere/editable_of_outside.py", 2.5),
        r"job\.source\.editable_of_outside\.py",
        before=_module("elsewhere/editable_of_outside.py", 1.5),
    ),
    "a value of a file that a loader is given": Kind(
        "import importlib.util as by; spec = by.spec_from_file_location('any', HERE.parent / 'elsewhere' / 'editable_of_outside.py'); "
        "any_of = by.module_from_spec(spec); spec.loader.exec_module(any_of); TAKEN.append(any_of.SCALE); del spec, any_of",
        _module("elsewhere/editable_of_outside.py", 2.5),
        r"job\.source\.editable_of_outside\.py",
        before=_module("elsewhere/editable_of_outside.py", 1.5),
    ),
    "sitecustomize": Kind(
        "TAKEN.append(sys.modules['sitecustomize'].SCALE)",
        lambda project, patch: _customized(project, patch, 2.5),
        r"job\.source\.sitecustomize\.py",
        before=lambda project, patch: _customized(project, patch, 1.5),
    ),
    "a line of a .pth file": Kind("TAKEN.append(getattr(sys, 'extra_scale', 1.5))", both(_pth, lambda project, patch: patch.setattr(sys, "extra_scale", 2.5, raising=False)), r"extra\.pth"),
    "a file of a library": Kind(
        "import ctypes; ctypes.CDLL(str(HERE.parent / 'kernel.so')); TAKEN.append((HERE.parent / 'kernel.so').stat().st_size)",
        lambda project, patch: _library(project, "0"),
        r"kernel\.so",
        before=lambda project, patch: _library(project, ""),
    ),
    "builtins replaced": Kind("TAKEN.append(float(pow(4.0, 0.5)))", _patched(builtins, "pow", lambda a, b: 2.5), r"builtins\.pow"),
    "math replaced": Kind("import math; TAKEN.append(math.erfc(0.5))", _patched(math, "erfc", math.gamma), r"math\.erfc"),
    "random replaced": Kind("import random; TAKEN.append(random.Random(0).random())", _patched(random, "Random", type("Random", (random.Random,), {"random": lambda self: 2.5})), r"random\.Random"),
    "torch replaced": Kind("TAKEN.append(float(torch.relu(torch.ones(()))))", _patched(torch, "relu", lambda x: x * 2), r"torch\.relu"),
    "a method of tensors replaced": Kind("TAKEN.append(float(torch.ones(()).exp()))", _patched(torch.Tensor, "exp", lambda x: x * 2), r"torch\.Tensor\.exp"),
    "functional replaced": Kind(
        "TAKEN.append(float(nn.functional.celu(torch.ones(()))))", _patched(torch.nn.functional, "celu", torch.exp), r"torch\.nn\.functional\.celu"
    ),
    "a layer replaced": Kind("TAKEN.append(float(nn.ReLU()(torch.ones(()))))", _patched(torch.nn.ReLU, "forward", lambda self, x: x * 2), r"torch\.nn\.ReLU\.forward"),
    "numpy replaced": Kind("import numpy; TAKEN.append(float(numpy.ptp([1.0, 2.0])))", _patched(np, "ptp", lambda x: 2.5), r"numpy\.ptp"),
    # --- the process and its machine
    "working folder": asked("TAKEN.append(float(len(os.getcwd())))", _new_folder, "working folder"),
    "Path.cwd": asked("TAKEN.append(float(len(str(Path.cwd()))))", _new_folder, "working folder"),
    "arguments": asked("TAKEN.append(float(len(sys.argv)))", lambda project, patch: patch.setattr(sys, "argv", [*sys.argv, "--scale"]), "arguments"),
    "argparse": asked(
        "import argparse; TAKEN.append(float(len(argparse.ArgumentParser().parse_known_args()[1])))",
        lambda project, patch: patch.setattr(sys, "argv", ["train", "1", "2", "3"]),
        "arguments",
        lambda project, patch: patch.setattr(sys, "argv", ["train"]),
    ),
    "host name": asked("import socket; TAKEN.append(float(len(socket.gethostname())))", _patched(socket, "gethostname", lambda: "another-machine-than-before"), "host name"),
    "user": asked("import getpass; TAKEN.append(float(len(getpass.getuser())))", variable("LOGNAME", "somebody else"), "user", variable("LOGNAME", "me")),
    "umask": asked("mask = os.umask(0); os.umask(mask); TAKEN.append(float(mask))", _umask, "umask"),
    "processors": asked("TAKEN.append(float(len(os.sched_getaffinity(0))))", _affinity, "processors"),
    "number conventions": asked(
        "import locale; TAKEN.append(float(len(locale.setlocale(locale.LC_NUMERIC))))",
        _undone(lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"), lambda: locale.setlocale(locale.LC_NUMERIC, "C")),
        "LC_NUMERIC",
    ),
    "time zone": asked("import time; TAKEN.append(time.localtime(0).tm_hour + 1.0)", _zone("Asia/Tokyo"), "time zone", _zone("UTC")),
    "recursion limit": asked(
        "TAKEN.append(sys.getrecursionlimit() / 1000)", _undone(lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 500), lambda: sys.setrecursionlimit(1000)), "recursion limit"
    ),
    "collector": asked(
        "import gc; TAKEN.append(float(gc.get_threshold()[0]))", _undone(lambda: gc.set_threshold(900, 10, 10), lambda: gc.set_threshold(700, 10, 10)), "garbage collector"
    ),
    "warnings": asked("import warnings; TAKEN.append(float(len(warnings.filters)))", lambda project, patch: warnings.simplefilter("error", BytesWarning), "warnings"),
    "numpy's print options": asked("import numpy; TAKEN.append(float(str(numpy.array(1.2345))[1:] or 1) + len(str(numpy.array([1.23456]))))", _print_options, "print options"),
    "torch's print options": asked("TAKEN.append(float(len(str(torch.tensor(1.23456)))))", _torch_options, "print options"),
    "decimal": asked(
        "import decimal; TAKEN.append(float(len(str(decimal.Decimal(1) / 3))))",
        _undone(lambda: setattr(decimal.getcontext(), "prec", 9), lambda: setattr(decimal.getcontext(), "prec", 28)),
        "decimal",
    ),
    "module path": asked("TAKEN.append(float(len(sys.path)))", lambda project, patch: patch.setattr(sys, "path", [*sys.path, str(project)]), "module path"),
    # --- other programs
    "check_output": asked(
        "import subprocess; TAKEN.append(subprocess.check_output(['cat', str(HERE / 'config.json')]))", text(CONFIG, "2.5"), r"starts another program \(cat", text(CONFIG, "1.5")
    ),
    "popen": asked("TAKEN.append(os.popen(f'cat {HERE}/config.json').read())", text(CONFIG, "2.5"), r"starts another program \(.*cat", text(CONFIG, "1.5")),
    "system": asked("TAKEN.append(float(os.system(f'exit $(cat {HERE}/config.json)')))", text(CONFIG, "2"), r"starts another program \(exit", text(CONFIG, "1")),
}  # fmt: skip


def _customized(project: Path, patch: pytest.MonkeyPatch, value: float) -> None:
    """As an interpreter that starts does, from a folder that outlives the job's modules."""
    file = project.parent / f"site-{project.name}" / "sitecustomize.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"SCALE = {value}\n")
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)  # of the same second and size
    spec = importlib.util.spec_from_file_location("sitecustomize", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "sitecustomize", module)
    spec.loader.exec_module(module)


def _library(project: Path, more: str) -> None:
    """Some shared library, with bytes at its end that the loader does not look at."""
    import _ctypes

    (project / "kernel.so").unlink(missing_ok=True)
    (project / "kernel.so").write_bytes(Path(_ctypes.__file__).read_bytes() + more.encode())


def _write(name: str) -> str:
    return f"(HERE / '{name}')"


HONEST: dict[str, Kind] = {
    "nothing": Kind("TAKEN.append(1.0)", lambda project, patch: None, ""),
    "another working folder": Kind("TAKEN.append(1.0)", _new_folder, ""),
    "another working folder, with paths from the file": Kind("TAKEN.append((Path(__file__).resolve().parent / 'config.json').read_text())", _new_folder, "", text(CONFIG, "1.5")),
    "other arguments": Kind("TAKEN.append(1.0)", lambda project, patch: patch.setattr(sys, "argv", ["resume"]), ""),
    "another host": Kind("TAKEN.append(1.0)", _patched(socket, "gethostname", lambda: "elsewhere"), ""),
    "another user": Kind("TAKEN.append(1.0)", both(variable("LOGNAME", "you"), variable("USER", "you"), variable("HOME", "/home/you")), ""),
    "a variable that nobody reads": Kind("TAKEN.append(os.environ.get('MY_SCALE', '1'))", variable("OTHER_SCALE", "2"), ""),
    "a file that nobody reads": Kind("TAKEN.append((HERE / 'config.json').read_text())", text("project/other.json", "2"), "", text(CONFIG, "1.5")),
    "a file touched": Kind("TAKEN.append((HERE / 'config.json').read_text())", lambda project, patch: os.utime(project / CONFIG, (1, 1)), "", text(CONFIG, "1.5")),
    "a file written anew with the same content": Kind("import json; TAKEN.append(json.load(open(HERE / 'config.json')))", text(CONFIG, "1.5"), "", text(CONFIG, "1.5")),
    "a big file copied": Kind("TAKEN.append((HERE / 'big.bin').read_bytes()[-1])", _big(1), "", before=_big(1)),
    "a module's file written anew": Kind("import editable_of_outside; TAKEN.append(1)", _module("elsewhere/editable_of_outside.py", 1.5), "", _module("elsewhere/editable_of_outside.py", 1.5)),
    "a cache that the job makes": Kind(
        "cache = HERE / 'cache.json'\nif not cache.exists(): cache.write_text('1.5')\nTAKEN.append(cache.read_text())", lambda project, patch: None, ""
    ),
    "a cache by another way": Kind(
        "import numpy\ntry: value = numpy.load(HERE / 'cache.npy')\nexcept OSError: value = numpy.array(1.5); numpy.save(HERE / 'cache.npy', value)\nTAKEN.append(float(value))",
        lambda project, patch: None,
        "",
    ),
    "a cache by torch.save": Kind(
        "cache = HERE / 'cache.pt'\ntry: value = torch.load(cache)\nexcept OSError: value = torch.tensor(1.5); torch.save(value, cache)\nTAKEN.append(float(value))",
        lambda project, patch: None,
        "",
    ),
    "a log that the job appends to": Kind("open(HERE / 'log.txt', 'a').write('imported')\nTAKEN.append(1.0)", lambda project, patch: None, ""),
    "a temporary file": Kind(
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: f.write('1.5'); f.flush(); TAKEN.append(open(f.name).read())", lambda project, patch: None, ""
    ),
    "a folder sorted": Kind("TAKEN.append(len(sorted(os.listdir(HERE.parent / 'listed'))))", lambda project, patch: None, "", _folder("a", "b")),
    "bytecode and hidden files in a folder that is listed": Kind(
        "TAKEN.append(len(list(HERE.glob('*.json'))))",
        lambda project, patch: ((project / "project" / "__pycache__").mkdir(exist_ok=True), (project / "project" / ".swp").write_text("")),
        "",
        text(CONFIG, "1"),
    ),
    "clocks for a log": Kind("import time; print(time.time(), time.perf_counter(), file=sys.stderr); TAKEN.append(1.0)", lambda project, patch: None, ""),
    "imports of the standard library": Kind("import calendar, mimetypes, uuid, zoneinfo; mimetypes.guess_type('a.png'); zoneinfo.ZoneInfo('UTC'); TAKEN.append(1.0)", lambda project, patch: None, ""),
    "an installed library's own files": Kind("import PIL.Image, yaml, pandas; TAKEN.append(1.0)", lambda project, patch: None, ""),
    "data that were moved": Kind(
        "TAKEN.append(next((HERE.parent / name / 'vocabulary.txt').read_text() for name in ('data', 'data-moved') if (HERE.parent / name).exists()))",
        lambda project, patch: (project / "data").rename(project / "data-moved"),
        "",
        before=lambda project, patch: ((project / "data").mkdir(), (project / "data" / "vocabulary.txt").write_text("1.5")),
        ),
    "data that were moved out of the job's folder": Kind(
        "TAKEN.append(next(path.read_text() for path in (HERE / 'data.txt', HERE.parent / 'data.txt') if path.exists()))",
        lambda project, patch: (project / "project" / "data.txt").rename(project / "data.txt"),
        "",
        before=text("project/data.txt", "1.5"),
    ),
    "data that were moved into the job's folder": Kind(
        "TAKEN.append(next(path.read_text() for path in (HERE / 'data.txt', HERE.parent / 'data.txt') if path.exists()))",
        lambda project, patch: (project / "data.txt").rename(project / "project" / "data.txt"),
        "",
        before=text("data.txt", "1.5"),
    ),
    "many files in fetch": Kind(
        "TAKEN.extend((HERE.parent / 'listed' / f'{i}_{k}').read_text() and 1.5 for k in range(40))",
        lambda project, patch: None,
        "",
        before=lambda project, patch: ((project / "listed").mkdir(), [(project / "listed" / f"{i}_{k}").write_text(str(i)) for i in range(16) for k in range(40)]),
        where="in_fetch",
    ),
}  # fmt: skip

__all__ = ["HONEST", "KINDS", "Kind", "json", "source", "undo"]
