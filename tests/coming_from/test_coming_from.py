"""The pages *Coming from …*: both programs run (the one before with `make exact`), and the pages have their text and their lengths."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coming_from.counting import lines_of
from tests.forked import Forked, lockstep
from tests.ports import free_port

HERE = Path(__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
AFTER = ["job.py", "train.yaml"]
PAGES = {
    "coming-from-torch.md": ["ddp.py", *AFTER],
    "coming-from-lightning.md": ["with_lightning.py", *AFTER],
    "coming-from-hugging-face.md": ["with_trainer.py", *AFTER],
    "coming-from-timm.md": ["timm_loop.py", "timm_job.py", "timm.yaml"],
    "coming-from-open-clip.md": ["open_clip_loop.py", "open_clip_job.py", "open_clip.yaml"],
    "coming-from-sentence-transformers.md": ["sentences_loop.py", "sentences_job.py", "sentences.yaml"],
    "coming-from-fairseq.md": ["fairseq_loop.py", "fairseq_job.py", "fairseq.yaml"],
}
LIBRARIES = ["timm", "open_clip", "sentences", "fairseq"]
"""Whose loops are written in plain torch: none of the libraries is needed."""

GOOD = 0.9
"""An accuracy on the held-out digits that nothing but training gives; guessing gives 0.1."""


def in_two_ranks(folder: Path) -> str:
    """What `ddp.py` prints, in two ranks as torchrun starts them."""
    from tests.coming_from import ddp

    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [Forked(ddp.main, folder, env={**shared, "RANK": str(rank)}) for rank in range(2)]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said[0][0]


def accuracy(printed: str) -> float:
    return float(re.findall(r"eval/accuracy ([\d.]+)", printed)[-1])


@pytest.mark.exact  # half a minute
def test_the_loop_by_hand_trains_and_takes_up_its_checkpoint(tmp_path: Path) -> None:
    from tests.coming_from import ddp

    printed = in_two_ranks(tmp_path)
    assert printed.count("epoch ") == ddp.EPOCHS
    assert accuracy(printed) > GOOD
    assert in_two_ranks(tmp_path) == ""  # all its epochs are done


@pytest.mark.scenario
def test_the_job_trains(tmp_path: Path) -> None:
    for name in AFTER:
        shutil.copy(HERE / name, tmp_path)
    process = lockstep("train", "train.yaml", "--local", "--json", "record.uri=off", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["metrics"]["eval/accuracy"] > GOOD


@pytest.mark.exact
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_loop_of_a_library_trains(library: str) -> None:
    done = subprocess.run(
        [sys.executable, f"{library}_loop.py"],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > GOOD


@pytest.mark.thinned(4)
@pytest.mark.scenario
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_job_in_its_place_trains(library: str, tmp_path: Path) -> None:
    for name in (f"{library}_job.py", f"{library}.yaml"):
        shutil.copy(HERE / name, tmp_path)
    process = lockstep("train", f"{library}.yaml", "--local", "--json", "record.uri=off", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["metrics"]["eval/accuracy"] > GOOD


@pytest.mark.exact  # half a minute
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("lightning", [sys.executable, "with_lightning.py"]),
        ("transformers", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "with_trainer.py"]),
    ],
)  # fmt: skip
def test_the_program_of_another_trainer_trains(package: str, command: list[str], tmp_path: Path) -> None:
    """Where it is installed."""
    pytest.importorskip(package)
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=HERE, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > GOOD


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_the_programs_and_their_lengths(page: str) -> None:
    text = (DOCS / page).read_text()
    for name in PAGES[page]:
        assert (HERE / name).read_text() in text, name
        told = re.search(
            rf"\[{re.escape(name)}\]\(../tests/coming_from/{re.escape(name)}\), (\d+) lines of code", text
        )
        assert told is not None
        assert int(told[1]) == lines_of(HERE / name)
