"""The built wheel holds what the package has, and trains a job in an environment of its own, away from the checkout.

    python -m tests.wheel_check FOLDER

builds the wheel, installs it with its pinned dependencies into a new environment below FOLDER, and has `lockstep` there write a
job and train it: in one process and on Ray, with one digest, recorded. FOLDER is made anew, and deleted where all went well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel = built(folder / "source", folder / "dist")
    print(f"wheel-check: {wheel.name} has {check_content(wheel)} files")
    commands = installed(wheel, folder / "environment")
    check_run(commands, folder / "elsewhere")
    shutil.rmtree(folder)


def built(source: Path, dist: Path) -> Path:
    """The wheel, of what git would commit: nothing that lies about can get into it."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(dist), str(source))
    (wheel,) = dist.glob("lockstep_train-*.whl")
    return wheel


def check_content(wheel: Path) -> int:
    """Every file of the package is in the wheel, and nothing else beside its metadata. How many there are."""
    platform = wheel.parents[1] / "source" / "platform"
    wanted = {
        path.relative_to(platform).as_posix() for path in (platform / "lockstep").rglob("*") if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted, (
        f"not in the wheel: {sorted(wanted - found)}; not in the package: {sorted(found - wanted)}"
    )
    return len(found)


def installed(wheel: Path, environment: Path) -> Path:
    """The folder of the commands of a new environment that has the wheel and its dependencies, and nothing else."""
    venv.create(environment, with_pip=True)
    pip = (
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        *CONSTRAINTS,
    )
    run(
        *pip, "torch"
    )  # first, and by its pinned version: a range would fetch the newest build with its CUDA packages
    run(*pip, str(wheel))
    return environment / "bin"


def check_run(commands: Path, elsewhere: Path) -> None:
    """A job that `lockstep init` writes trains to one digest in one process and on Ray, and both runs are in the store."""
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def lockstep(*words: str, cwd: Path) -> str:
        return run(str(commands / "lockstep"), *words, cwd=cwd, env=environment)

    print(lockstep("--version", cwd=elsewhere).strip().replace("\n", ", "))
    lockstep("init", "first", cwd=elsewhere)
    train = ("train", "train.yaml", "--json", "length.epochs=1", "workers.max=1")
    digests = {}
    for name, words in {"local": ("--local",), "ray": ("--address", "local")}.items():
        result: dict[str, Any] = json.loads(lockstep(*train, *words, cwd=elsewhere / "first"))
        assert result["status"] == "FINISHED", result
        digests[name] = result["weights_digest"]
    assert digests["local"] == digests["ray"], digests
    runs = json.loads(lockstep("runs", "--json", cwd=elsewhere / "first"))["runs"]
    assert [one["status"] for one in runs] == ["FINISHED", "FINISHED"], runs
    where = run(
        str(commands / "python"),
        "-c",
        "import lockstep; print(lockstep.__file__)",
        cwd=elsewhere,
        env=environment,
    )
    assert str(commands.parent) in where, where
    print(f"wheel-check: trained in one process and on Ray, weights_digest {digests['ray']}")


def run(*words: str, **options: Any) -> str:
    """A command's standard output. RuntimeError, with what it said, where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)} failed ({done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
