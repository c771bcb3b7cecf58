"""What `make mutants` plants: one small mistake at a time, the same for a seed, and nothing that is no mistake."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import Answers, main
from tests.mutants.modules import COVERED, EQUIVALENT
from tests.mutants.mutations import mutants, sampled

ROOT = Path(__file__).parents[2]

SOURCE = '''
LIMIT = 3

class Group:
    def close(self, *, wait=True):
        """Words."""
        if self.open and not self.lost:
            self.send("é", wait=wait)
            self.count += 1
        return [one for one in self.members if one < 2]
'''


def changed(kind: str) -> list[str]:
    """The lines that the mutants of a kind change, as they are then."""
    sound = SOURCE.splitlines()
    found = [mutant.source.splitlines() for mutant in mutants(SOURCE) if f": {kind}:" in mutant.name]
    return [new.strip() for lines in found for old, new in zip(sound, lines, strict=True) if old != new]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("and/or swapped", ["if (self.open or not self.lost):"]),
        ("condition negated", ["if (not (self.open and (not self.lost))):", "if self.open and (self.lost):"]),
        ("statement deleted", ["pass", "pass"]),
        ("argument left out", ["self.send('é')"]),
        ("constant changed", ["self.count += (2)", "self.count += (0)"]),
        ("None returned", ["return None"]),
        ("comparison swapped", ["return [one for one in self.members if (one <= 2)]"]),
    ],
)
def test_each_kind_of_mistake_changes_one_line(kind: str, lines: list[str]) -> None:
    found = changed(kind)
    assert [line for line in lines if line not in found] == []


def test_every_mutant_is_another_program_and_has_a_name_of_its_own() -> None:
    every = mutants(SOURCE)
    assert len({one.name for one in every}) == len({one.source for one in every}) == len(every)
    assert all(ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(SOURCE)) for one in every)
    assert not any("LIMIT" in one.name or "Words" in one.name for one in every)


def test_what_no_test_can_notice_is_not_planted() -> None:
    """A claim of the source's own, and the very instant at which a clock shows a number."""
    source = """
def wait(names, ages, until):
    for name, age in zip(names, ages, strict=True):
        while time.monotonic() < until:
            tick(name, age)
"""
    kinds = [mutant.name.split(":")[1].strip() for mutant in mutants(source)]
    assert kinds == ["condition negated", "statement deleted"]


def test_a_sample_follows_from_its_seed_and_grows() -> None:
    every = mutants(SOURCE)
    assert sampled("a.py", every, 5, 0) == sampled("a.py", every, 9, 0)[:5]
    assert sampled("a.py", every, 9, 0) != sampled("a.py", every, 9, 1)


@pytest.mark.parametrize("module", COVERED)
def test_the_map_names_what_is_there(module: str) -> None:
    for name in COVERED[module]:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file() and f"def {test}" in (ROOT / path).read_text(), name


@pytest.mark.scenario
@pytest.mark.parametrize("module", sorted(EQUIVALENT))
def test_an_equivalent_whose_line_has_changed_is_looked_at_again(module: str) -> None:
    source = (ROOT / "platform" / "lockstep" / module).read_text()
    assert sorted(set(EQUIVALENT[module]) - {mutant.name for mutant in mutants(source)}) == []


def test_an_answer_holds_as_long_as_nothing_that_it_rests_on_has_changed(tmp_path: Path) -> None:
    """Killed: the source of the mutant; survived: also the tests."""
    module = "record/ledger/journal_file.py"
    first, second = mutants(SOURCE)[:2]
    answers = Answers(tmp_path / "kept" / "answers.jsonl")
    answers.put(module, first, killed=True, by="FAILED", seconds=1.0)
    answers.put(module, second, killed=False, by="", seconds=1.0)
    again = Answers(tmp_path / "kept" / "answers.jsonl")
    assert [again.get(module, one) is not None for one in (first, second)] == [True, True]
    assert again.get(module, first._replace(source=second.source)) is None
    text = (tmp_path / "kept" / "answers.jsonl").read_text().replace('"tests": "', '"tests": "other')
    (tmp_path / "kept" / "answers.jsonl").write_text(text)
    later = Answers(tmp_path / "kept" / "answers.jsonl")
    assert [later.get(module, one) is not None for one in (first, second)] == [True, False]


def test_a_module_that_is_not_in_the_map_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["training/nothing.py"])
    assert ended.value.code == 2
    assert "got 'training/nothing.py', wanted some of: attempts/supervisor.py" in capsys.readouterr().err
