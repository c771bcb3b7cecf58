"""Which test files cover a module, the quick ones first, and which mutants are none: the module does the same with them."""

from __future__ import annotations

COVERED = {
    "attempts/supervisor.py": ["tests/unit/attempts/test_supervisor.py"],
    "attempts/attempt_watch.py": ["tests/unit/attempts/test_supervisor.py"],
    "attempts/attempts_account.py": ["tests/unit/attempts/test_supervisor.py"],
    "attempts/untrusted_workers.py": ["tests/unit/attempts/test_untrusted_workers.py"],
    "attempts/fault_attribution.py": [
        "tests/unit/attempts/test_fault_attribution.py",
        "tests/unit/attempts/test_supervisor.py",
    ],
    "record/ledger/journal_file.py": [
        "tests/unit/record/ledger/test_journal_file.py",
        "tests/unit/record/ledger/test_journal.py",
        "tests/unit/record/test_full_disk.py",
        "tests/unit/record/test_power_loss.py",
        "tests/unit/record/test_refusals.py",
    ],
    "record/ledger/journal.py": [
        "tests/unit/record/ledger/test_journal_file.py",
        "tests/unit/record/ledger/test_journal.py",
        "tests/unit/record/test_full_disk.py",
        "tests/unit/record/ledger/test_goodput.py",
        "tests/unit/record/test_going_on.py",
        "tests/unit/record/test_power_loss.py",
    ],
    "record/mirror/metric_batches.py": [
        "tests/unit/record/mirror/test_metric_batches.py",
        "tests/unit/record/test_outage.py",
        "tests/unit/record/test_partial_store.py",
    ],
    "communication/kernels.py": ["tests/distributed/test_kernels.py"],
    "training/elastic/recovery.py": [
        "tests/unit/training/elastic/test_recovery.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_survivors.py",
    ],
    "training/setup.py": [
        "tests/unit/training/test_setup.py",
        "tests/distributed/test_stop.py",
        "tests/distributed/test_initial_weights.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_recheck.py",
        "tests/distributed/test_without.py",
        "tests/distributed/test_full_sharding.py::test_a_parameter_that_the_job_holds_itself_is_refused",
        "tests/distributed/test_full_sharding.py::test_a_parameter_that_only_garbage_holds_is_let_go",
        "tests/distributed/test_full_sharding.py::test_evaluations_and_updates_of_the_job_s_own_are_those_of_the_whole_model",
        "tests/distributed/test_full_start.py::test_a_start_by_shards_finds_samples_to_evaluate_that_draw_though_they_say_otherwise",
        "tests/distributed/test_mirrored_shards.py",
        "tests/unit/proof/test_verify.py",
        "tests/distributed/test_mistakes.py",
    ],
    "training/planning.py": [
        "tests/unit/training/test_planning.py",
        "tests/unit/training/test_setup.py",
        "tests/unit/data/test_dataset_order.py",
        "tests/distributed/test_without.py",
    ],
    "training/metric_rules.py": ["tests/unit/training/test_setup.py"],
    "training/loop.py": [
        "tests/unit/training/test_loop.py",
        "tests/distributed/test_stop.py",
        "tests/distributed/test_last_comparison.py",
        "tests/distributed/test_evaluation.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_inputs.py",
        "tests/distributed/test_survivors.py",
        "tests/distributed/test_resume.py",
    ],
    "training/evaluation/evaluation_schedule.py": [
        "tests/distributed/test_evaluation.py",
        "tests/distributed/test_evaluation_beside.py",
        "tests/distributed/test_own_schedule.py",
        "tests/distributed/test_resume.py",
    ],
    "training/evaluation/evaluator_process.py": ["tests/distributed/test_evaluation_beside.py"],
    "training/integrity/checksum.py": ["tests/unit/training/integrity/test_checksum.py"],
    "training/integrity/agreement.py": [
        "tests/unit/training/integrity/test_agreement.py",
        "tests/distributed/test_drift.py",
        "tests/distributed/test_recheck.py",
    ],
    "training/step/step_exchange.py": [
        "tests/unit/training/step/test_step_exchange.py",
        "tests/distributed/test_exchange.py",
    ],
    "training/step/optimizer_step.py": [
        "tests/distributed/test_same_bits.py",
        "tests/distributed/test_phases.py",
        "tests/distributed/test_mistakes.py",
        "tests/distributed/test_fp16.py",
        "tests/distributed/test_closures.py",
        "tests/distributed/test_drift.py",
        "tests/distributed/test_recheck.py",
        "tests/distributed/test_survivors.py",
        "tests/distributed/test_mirrors.py",
        "tests/distributed/test_groups.py",
    ],
    "training/step/accumulation.py": [
        "tests/distributed/test_same_bits.py",
        "tests/distributed/test_batch_loss.py",
        "tests/distributed/test_gradients.py",
        "tests/distributed/test_recheck.py",
        "tests/distributed/test_without.py",
        "tests/distributed/test_phases.py",
        "tests/distributed/test_full_sharding.py",
        "tests/distributed/test_drift.py",
    ],
    "training/step/forward_backward.py": [
        "tests/distributed/test_same_bits.py",
        "tests/distributed/test_mistakes.py",
        "tests/distributed/test_modes.py",
        "tests/distributed/test_batch_loss.py",
        "tests/distributed/test_drift.py",
        "tests/distributed/test_reports.py",
        "tests/distributed/test_full_sharding.py",
        "tests/distributed/test_fp16.py",
    ],
    "training/step/full_sharding.py": [
        "tests/distributed/test_full_start.py",
        "tests/distributed/test_full_sharding.py",
    ],
    "training/step/host_memory.py": ["tests/distributed/test_offload.py"],
    "training/step/sharded_modes.py": ["tests/distributed/test_full_sharding.py"],
    "training/step/mirrored_optimizer.py": ["tests/distributed/test_mirrors.py"],
    "training/step/mirror_layout.py": [
        "tests/distributed/test_mirrors.py",
        "tests/distributed/test_mirrored_shards.py",
    ],
    "record/mirror/delivery_lanes.py": [
        "tests/unit/record/mirror/test_delivery_lanes.py",
        "tests/unit/record/mirror/test_metric_batches.py",
        "tests/unit/record/test_partial_store.py",
    ],
    "record/mirror/projection.py": [
        "tests/unit/record/mirror/test_projection.py",
        "tests/unit/record/test_going_on.py",
    ],
    "record/mirror/reconciler.py": [
        "tests/unit/record/mirror/test_reconciler.py",
        "tests/unit/record/mirror/test_delivery_lanes.py",
        "tests/unit/record/test_recorder.py",
        "tests/unit/record/test_kept_checkpoints.py",
        "tests/unit/record/test_partial_store.py",
        "tests/unit/record/test_outage.py",
    ],
    "checkpoint/manifest.py": [
        "tests/unit/checkpoint/test_manifest.py",
        "tests/unit/checkpoint/test_format.py",
    ],
    "checkpoint/reader.py": [
        "tests/unit/checkpoint/test_store.py",
        "tests/unit/checkpoint/test_damage.py",
        "tests/unit/checkpoint/test_format.py",
        "tests/unit/checkpoint/test_shared.py",
    ],
    "checkpoint/saver.py": [
        "tests/unit/checkpoint/test_saver.py",
        "tests/unit/checkpoint/test_full_disk.py",
        "tests/unit/checkpoint/test_shared.py",
    ],
    "checkpoint/snapshot.py": [
        "tests/unit/checkpoint/test_snapshot.py",
        "tests/unit/checkpoint/test_shared.py",
    ],
    "checkpoint/tree.py": ["tests/unit/checkpoint/test_tree.py"],
    "checkpoint/writer.py": [
        "tests/unit/checkpoint/test_store.py",
        "tests/unit/checkpoint/test_format.py",
        "tests/unit/checkpoint/test_shared.py",
    ],
    "proof/run_diff.py": ["tests/unit/proof/test_diff.py", "tests/unit/proof/test_refusals.py"],
    "sweeps/trial.py": [
        "tests/unit/sweeps/test_trial.py",
        "tests/unit/sweeps/test_resumption.py",
        "tests/unit/sweeps/test_schedulers.py",
        "tests/unit/sweeps/test_population.py",
        "tests/unit/sweeps/test_trial_rendezvous.py",
        "tests/cluster/test_trials_on_ray.py",
        "tests/cluster/test_sweep.py",
        "tests/cluster/test_sweep_faults.py",
    ],
    "sweeps/trial_rendezvous.py": [
        "tests/unit/sweeps/test_trial_rendezvous.py",
        "tests/cluster/test_trials_on_ray.py",
        "tests/cluster/test_sweep_faults.py",
    ],
    "sweeps/trial_run.py": [
        "tests/unit/sweeps/test_trial_rendezvous.py",
        "tests/unit/sweeps/test_refusals.py",
        "tests/unit/sweeps/test_resumption.py",
        "tests/cluster/test_trials_on_ray.py",
        "tests/cluster/test_sweep.py",
    ],
    "sweeps/trial_standings.py": ["tests/unit/sweeps/test_record.py"],
    "sweeps/trial_watchdog.py": [
        "tests/unit/test_trial_watchdog.py",
        "tests/cluster/test_trials_on_ray.py",
    ],
    "training/start.py": [
        "tests/unit/training/test_start.py",
        "tests/unit/training/test_determinism.py",
        "tests/distributed/test_initial_weights.py",
        "tests/distributed/test_resume.py",
        "tests/distributed/test_table_snapshots.py",
        "tests/distributed/test_relay.py",
        "tests/distributed/test_full_start.py",
    ],
    "training/checkpoints.py": [
        "tests/unit/training/test_checkpoints.py",
        "tests/distributed/test_resume.py",
        "tests/distributed/test_evaluation.py",
        "tests/distributed/test_joining.py",
        "tests/distributed/test_evaluation_beside.py",
    ],
    "training/optimizer_state.py": [
        "tests/unit/training/test_optimizer_state.py",
        "tests/unit/training/test_state.py",
        "tests/unit/training/test_refusals.py",
        "tests/distributed/test_phases.py",
        "tests/distributed/test_resume.py",
    ],
    "training/integrity/rehearsal/trial_batches.py": [
        "tests/distributed/test_hold_kinds.py",
        "tests/distributed/test_invisible_rehearsal.py",
        "tests/distributed/test_mistakes.py",
        "tests/distributed/test_batch_loss.py",
    ],
    "training/integrity/rehearsal/repetition.py": [
        "tests/distributed/test_hold_kinds.py",
        "tests/distributed/test_invisible_rehearsal.py",
        "tests/distributed/test_mistakes.py",
        "tests/distributed/test_batch_loss.py",
    ],
    "training/deferred_dynamo.py": ["tests/unit/training/test_deferred_dynamo.py"],
    "training/determinism.py": [
        "tests/unit/training/test_determinism.py",
        "tests/unit/training/test_deferred_dynamo.py",
    ],
    "training/step/mirrored_shards.py": [
        "tests/distributed/test_drift.py",
        "tests/distributed/test_mirrors.py",
        "tests/distributed/test_mirrored_shards.py",
    ],
}
"""By module below `platform/lockstep`."""

_PACE = "the same is seen, up to a second earlier or later"
_FALSE = "what is returned is only asked whether it is true"
_STEPS = "no step is below 0"

EQUIVALENT: dict[str, dict[str, str]] = {
    "attempts/attempt_watch.py": {
        "AttemptWatch._pace_s: and/or swapped: self._stop.asked or self.moving or self._change or untold -> (self._stop.asked and self.moving and self._change and untold)": _PACE,
        "AttemptWatch._pace_s: condition negated: not self._account.is_named -> (not (not self._account.is_named))": _PACE,
    },
    "record/ledger/journal_file.py": {
        "JournalFile._lines: comparison swapped: start < until -> (start <= until)": "no bytes are read then, which ends the loop",
        "JournalFile.append: statement deleted: self.torn = False -> pass": "the next line first cuts off what follows the last whole one: nothing",
        "JournalFile.__init__: constant changed: False -> True": "as above, before the first line",
        "JournalFile.is_deleted: None returned: return False -> return None": _FALSE,
    },
    "record/ledger/journal.py": {
        "newest_step: statement deleted: file.seek(max(0, size - length)) -> pass": "all of the file is read, and not its end alone: slower",
        "Journal._first_step: constant changed: 0 -> (-1)": "it is asked for only where there are steps",
        "Journal.missing_steps: constant changed: 0 -> (-1)": "a range that is empty, too",
        "Journal.missing_steps: constant changed: 1 -> (2)": "all steps are looked through: slower",
        "newest_step: comparison swapped: length >= size -> (length > size)": "all of the file is read once more",
    },
    "record/mirror/metric_batches.py": {
        "MetricCursor._batches: comparison swapped: len(points) > POINTS_PER_CALL -> (len(points) >= POINTS_PER_CALL)": "a full batch is sent now, or as the next row comes",
        "MetricCursor._is_new: constant changed: 1 -> (2)": _STEPS,
        "MetricCursor._is_new: constant changed: 1 -> (0)": "a point of step 0 is compared with the highest step either way",
        "MetricCursor._is_new: constant changed: 1 -> (2) #2": _STEPS,
    },
    "record/mirror/reconciler.py": {
        "Reconciler._send_reference: constant changed: 0 -> (1)": "the number of publications is only compared with the one before",
    },
    "sweeps/trial.py": {
        "Training._history: constant changed: 0 -> (-1) #2": _STEPS,
        "Training.leave: constant changed: 1 -> (2)": "a process that fails is lost, whatever its exit code",
        "_is_lost: None returned: return False -> return None": _FALSE,
        "_is_lost: None returned: return False -> return None #2": _FALSE,
    },
    "training/checkpoints.py": {
        "Checkpoints.__init__: constant changed: 1 -> (0)": "no checkpoint is of step 0",
    },
    "training/elastic/recovery.py": {
        "with_past: constant changed: 0 -> (-1)": "any of the differences may be named",
    },
}
"""By module, the name of each such mutant and why no test can notice it."""
