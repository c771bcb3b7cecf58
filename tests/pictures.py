"""The pictures of the README and the pages, made anew of a real run and a real sweep: `make pictures`, or `python -m tests.pictures [terminal|run|sweep|models|sets|health|memory]…`.

Those of MLflow's pages need chromium on the PATH (Debian: `apt-get install chromium`). Files go to docs/pictures.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.ports import free_port
from tests.screen import as_svg, shown
from tests.unit.record.test_ui import Pages, ui

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COMMAND = "lockstep train jobs/digits/train.yaml --local"
CURVES = "lockstep show RUN --plot 'eval/*/accuracy'"
HEALTH = "lockstep check jobs/digits/train.yaml --health --local"
WANTED = ("terminal", "run", "sweep", "models", "sets", "health", "memory")

TWO_SETS = (
    "name=digits-sets", "job.use=tests.pictured_jobs:TwoSets", "record.experiment=digits-models", "checkpoint.every.epochs=5",
    "checkpoint.keep_last=5", "checkpoint.keep_best={metric: eval/noisy/accuracy, mode: max}",
)  # fmt: skip
"""What is changed of the example's run: another set beside its own, and checkpoints that can be compared."""

SWEEP = ("trials=6", "spec.length.epochs=10", "spec.record.experiment=digits-sweep")
"""What is changed of the example's sweep: less of it, in an experiment of its own."""

GROWING = {
    "job": {"use": "tests.memory_jobs:Growing", "params": {"after": 3, "wide": 40_000}}, "batch": {"global": 64, "micro": 16},
    "length": {"steps": 12}, "optimizer": {"name": "adamw"}, "threads": 1,
}  # fmt: skip
"""A run whose micro-batches grow after three steps."""

ADDRESS_SPACE = 4 << 30
"""The bytes that it may take."""

HOME = "/home/me/lockstep"
"""What pictures show in the place of the folder of the run."""

SETTLE_MS = 20_000
"""How long a page may load, in its own time, before its picture is taken."""

MOST_BYTES = 300_000


def main(wanted: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lock", dir="/tmp") as place:
        # As long as HOME: a screen that shows HOME instead has its lines broken where they are.
        assert len(place) == len(HOME)
        folder, uri = Path(place), f"sqlite:///{place}/mlflow.db"
        if {"terminal", "run"} & {*wanted}:
            terminal(folder, uri)
        if "sweep" in wanted:
            words = ["sweep", "jobs/digits/sweep.yaml", *SWEEP, "--uri", uri, "--json"]
            command = [sys.executable, "-m", "lockstep", *words, f"spec.checkpoint.storage={folder}/runs"]
            subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
        if {"models", "sets"} & {*wanted}:
            sets(folder, uri)
        if "health" in wanted:
            health(folder)
        if "memory" in wanted:
            memory(folder)
        if {"run", "sweep", "models"} & {*wanted}:
            port = free_port()
            # The table of models is asked for by a POST, which a page of another address may not send by default.
            allowed = {"MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"http://192.168.0.1:{port}"}
            with ui("--uri", uri, port=port, environment=allowed):
                pages(Pages(f"http://127.0.0.1:{port}"), folder, wanted)
    for picture in PICTURES.iterdir():
        assert picture.stat().st_size < MOST_BYTES, picture
        print(picture.relative_to(ROOT), picture.stat().st_size)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}", "PYTHONHASHSEED": "0"}


def terminal(folder: Path, uri: str) -> None:
    """The screen in the middle of a run, and at its end."""
    store = ("--uri", uri, f"checkpoint.storage={folder}/runs")
    command = [sys.executable, "-m", "lockstep", *COMMAND.split()[1:], *store]
    middle, end = shown(command, ROOT, environment(), lambda lines: "epoch 13 " in "\n".join(lines))
    for name, lines in {"running": middle, "finished": end}.items():
        told = [line.replace(str(folder), HOME) for line in lines]
        (PICTURES / f"{name}.svg").write_text(as_svg(told, COMMAND))


def sets(folder: Path, uri: str) -> None:
    """A run that is evaluated on two named sets, and its curves in a terminal."""
    words = ["train", "jobs/digits/train.yaml", "--local", *TWO_SETS, "--uri", uri, "--json"]
    command = [sys.executable, "-m", "lockstep", *words, f"checkpoint.storage={folder}/runs"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE)
    words = ["show", json.loads(done.stdout)["run_id"], "--plot", "eval/*/accuracy", "--uri", uri]
    _, end = shown([sys.executable, "-m", "lockstep", *words], ROOT, environment(), bool)
    (PICTURES / "sets.svg").write_text(as_svg(end, CURVES))


def health(folder: Path) -> None:
    """What `lockstep check` says of the machine."""
    store = ("--uri", "off", f"checkpoint.storage={folder}/runs")
    command = [sys.executable, "-m", "lockstep", *HEALTH.split()[1:], *store]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    told = [line.replace(str(folder), HOME) for line in done.stdout.splitlines()]
    (PICTURES / "health.svg").write_text(as_svg(told, HEALTH, columns=110))


def memory(folder: Path) -> None:
    """What a worker held as its address space was full."""
    spec = folder / "growing.yaml"
    spec.write_text(json.dumps(GROWING))
    words = ["train", str(spec), "--local", "--uri", "off", f"checkpoint.storage={folder}/growing"]

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words], cwd=ROOT, env=environment(), capture_output=True, preexec_fn=bounded, check=False,
    )  # fmt: skip
    (text,) = folder.glob("growing/*/memory-attempt-1-rank-0.txt")
    assert done.returncode == 1
    told = [line.replace(str(folder), HOME) for line in text.read_text().splitlines()]
    (PICTURES / "memory.svg").write_text(
        as_svg(told, "cat runs/RUN/memory-attempt-1-rank-0.txt", columns=118)
    )


def pages(server: Pages, folder: Path, wanted: list[str]) -> None:
    """MLflow's page of the run, and that of the sweep."""
    found = server.post("experiments/search", max_results=100)["experiments"]
    experiments = {one["name"]: one["experiment_id"] for one in found}
    if "run" in wanted:
        photograph(
            server, page_of(server, experiments["digits"], "digits") + "/model-metrics", "run.png", folder
        )
    if "models" in wanted:
        photograph(
            server, f"experiments/{experiments['digits-models']}/models", "models.png", folder, "2560,640"
        )
    if "sweep" in wanted:
        photograph(server, page_of(server, experiments["digits-sweep"], "digits-sweep"), "sweep.png", folder)


def page_of(server: Pages, experiment: str, name: str) -> str:
    """The page of the run of this name."""
    found = server.post("runs/search", experiment_ids=[experiment], max_results=100)["runs"]
    (run,) = [one["info"]["run_id"] for one in found if one["info"]["run_name"] == name]
    return f"experiments/{experiment}/runs/{run}"


def photograph(server: Pages, path: str, name: str, folder: Path, size: str = "1280,800") -> None:
    """A picture of a page, under an address that MLflow takes for a remote one: on a local one it opens its assistant beside the page.

    It lets a remote page ask (GET) and not search (POST), unless it is told that it may: the table of runs and that of models stay empty.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("pictures: chromium is not on the PATH; apt-get install chromium")
    port = server.uri.rpartition(":")[2]
    link = f"http://192.168.0.1:{port}/#/{path}{'&' if '?' in path else '?'}workflowType=machine_learning"
    words = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}",
        "--host-resolver-rules=MAP 192.168.0.1 127.0.0.1", f"--user-data-dir={folder}/chromium",
        f"--virtual-time-budget={SETTLE_MS}", f"--screenshot={PICTURES / name}", link,
    ]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True, timeout=300)


if __name__ == "__main__":
    main(sys.argv[1:] or list(WANTED))
