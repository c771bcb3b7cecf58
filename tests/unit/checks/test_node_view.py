"""What nodes see is compared: a problem is told with its node, and bits that differ with both."""

from __future__ import annotations

from pathlib import Path

from lockstep.checks.node_view import Sight, compared, look_from_here
from lockstep.spec.fields import Spec
from lockstep.spec.loading import load_spec


def spec_of(job: str, folder: Path, *overrides: str) -> Spec:
    document = {
        "job": {"use": f"tests.faulty_jobs.jobs:{job}"},
        "batch": {"global": 32, "micro": 8},
        "record": {"uri": "off"},
        "checkpoint": {"storage": str(folder / "runs")},
    }
    return load_spec(document, overrides)


def test_two_nodes_that_see_the_same_pass(tmp_path: Path) -> None:
    sight = look_from_here(spec_of("Sound", tmp_path))
    assert sight == look_from_here(spec_of("Sound", tmp_path))
    assert not sight.problems
    assert sight.facts.keys() >= {"numerics probe", "initial weights", "the first micro-batch's loss"}
    (finding,) = compared({"10.0.0.1": sight, "10.0.0.2": sight})
    assert finding.result == "pass"
    assert "2 nodes" in finding.evidence
    assert not list(tmp_path.iterdir())


def test_weights_that_are_other_ones_on_another_node_are_told(tmp_path: Path) -> None:
    spec = spec_of("Entropy", tmp_path)
    found = compared({"10.0.0.1": look_from_here(spec), "10.0.0.2": look_from_here(spec)})
    assert [f.result for f in found] == ["failure", "failure"], "the weights and the loss"
    assert found[0].evidence.startswith("initial weights on 10.0.0.1 is ")


def test_what_a_node_cannot_do_is_told_with_its_address(tmp_path: Path) -> None:
    good = look_from_here(spec_of("Sound", tmp_path))
    bad = look_from_here(spec_of("Truncated", tmp_path, "data.shuffle=none", "checkpoint.storage=/proc/runs"))
    assert bad.problems.keys() == {"storage"}, "the first micro-batch can be read"
    found = compared({"10.0.0.1": good, "10.0.0.2": bad})
    assert [(f.name, f.result) for f in found] == [("nodes", "failure")]
    assert found[0].evidence.startswith("10.0.0.2: checkpoint.storage: cannot write in '/proc/runs'")
    lost = compared({"10.0.0.3": Sight({"answer": "it did not answer within 60 s"})})
    assert lost[0].evidence == "10.0.0.3: it did not answer within 60 s"
    assert lost[0].remedy
