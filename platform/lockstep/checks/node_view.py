"""What one node sees of a run: its code, its folders, its store and its data, and the bits that it computes. Compared between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lockstep.checks.findings import Finding, failed, passed
from lockstep.checks.fixture import Fixture
from lockstep.checks.run_checks import record_answers
from lockstep.checks.start_checks import check_storage
from lockstep.errors import LockstepError, evidence_and_remedy
from lockstep.job.loading import others_out_of_sight
from lockstep.spec.fields import Spec
from lockstep.training.determinism import determinism, numerics_probe, numpy_probe
from lockstep.training.integrity.state_digest import weights_digest


@dataclass(frozen=True, slots=True)
class Sight:
    """What a node sees. `problems` are lines by what was tried; `facts` must be the same on every node."""

    problems: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)


def look_from_here(spec: Spec) -> Sight:
    """Try in this process what a worker on this node will have to do: write, reach the store, read the data, compute a micro-batch."""
    problems: dict[str, str] = {}
    facts: dict[str, str] = {}
    fixture = Fixture(spec)

    def tried(check: str, action: Callable[[], object]) -> None:
        try:
            action()
        except LockstepError as error:
            problems[check] = str(error)

    def computed() -> None:
        state, key = fixture.fresh(), fixture.step_keys()[0]
        facts["training samples"] = str(fixture.plan.samples)
        facts["initial weights"] = weights_digest(state.model.state_dict())
        module = fixture.modules(state.job, state.model)[0]
        loss = fixture.backward(module, state, fixture.fetch(key), key)
        facts["the first micro-batch's loss"] = float(loss.total.detach()).hex()

    with determinism(spec.determinism, spec.threads), others_out_of_sight():
        tried("storage", lambda: check_storage(spec))
        tried("record", lambda: record_answers(spec))
        tried("data and model", computed)
        if spec.determinism == "strict":
            facts["numerics probe"] = f"{numerics_probe(fixture.device)} {numpy_probe()}"
    return Sight(problems, facts)


def compared(sights: Mapping[str, Sight]) -> list[Finding]:
    """What the nodes see, by address, as findings: each problem with its node, and each fact that differs."""
    findings = [
        failed(
            "nodes",
            f"{address}: {evidence_and_remedy(line)[0]}",
            evidence_and_remedy(line)[1] or f"mend it on {address}, or keep workers away from that node",
        )
        for address, sight in sights.items()
        for line in sight.problems.values()
    ]
    facts_by_address = {address: sight.facts for address, sight in sights.items() if not sight.problems}
    first = next(iter(facts_by_address), None)
    for address, facts in facts_by_address.items():
        for name, value in facts.items():
            if first is not None and value != facts_by_address[first].get(name):
                findings.append(
                    failed(
                        "nodes",
                        f"{name} on {first} is {facts_by_address[first].get(name)}, on {address} {value}",
                        "use machines of one kind, with the same code and the same data; initial weights come from the seeded generators alone",
                    )
                )
    if findings:
        return findings
    same = ", ".join(facts_by_address[first]) if first is not None else "nothing"
    return [
        passed(
            "nodes", f"{len(sights)} nodes write, reach the store and read the data; the same on all: {same}"
        )
    ]
