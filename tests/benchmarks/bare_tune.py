"""A bare Ray Tune loop over the same training function, as its documentation would write it: the peer of `sweeps.py`.

    python bare_tune.py SWEEP.json

Each trial is a function trainable with one CPU that trains by `fit`, reports each evaluation, and records nothing.
"""

import json
import sys
import tempfile
from pathlib import Path


def train_trial(config):
    import torch
    from ray import tune

    from lockstep.communication.group import Group
    from lockstep.job.loading import load_job
    from lockstep.record.ledger.rows import EvaluationRow
    from lockstep.spec.loading import load_spec
    from lockstep.training.driver_requests import NoRequests
    from lockstep.training.loop import fit

    def report(event):
        if isinstance(event, EvaluationRow):
            tune.report({"step": event.step, **event.metrics})

    sys.path.insert(0, config["folder"])
    spec = load_spec(config["spec"])
    fit(spec, load_job(spec.job.use, spec.job.params), Group.join(torch.device("cpu")), report, NoRequests())


if __name__ == "__main__":
    import ray
    from ray import tune

    specs = json.loads(Path(sys.argv[1]).read_text())
    ray.init(address="local", include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        results = tune.Tuner(
            tune.with_resources(train_trial, {"cpu": 1}),
            param_space={"spec": tune.grid_search(specs), "folder": str(Path.cwd())},
            tune_config=tune.TuneConfig(metric="eval/accuracy", mode="max"),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        assert len(results) == len(specs)
        assert not results.errors
        print(results.get_best_result().metrics["eval/accuracy"])
