"""What can be wrong with an export or its artifact: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ExportError, Problem

SIZES = "take sizes from the input's shape wherever forward needs them, or export it with --fixed-batch"
"""What to do where a number of rows is written into a model."""

FIXED_ROWS = Problem(
    "export.fixed_rows",
    ExportError,
    "export: the model does not take any number of rows: {got}",
    SIZES,
    cause="`forward` has a batch size written into it",
    advice="take it from the input's shape; or `--fixed-batch`",
)

NOT_TRACED = Problem(
    "export.not_traced",
    ExportError,
    "export: {format}: the model cannot be traced{where}: {got}",
    cause="`forward` branches on values, or calls what torch's exporter does not know",
    advice="follow the message, which names the place in the model",
)

DIFFERENT = Problem(
    "export.different",
    ExportError,
    "export: {format}: output {name!r} for {rows} rows is not that of eager mode: {got}, where {wanted} is allowed; nothing was kept",
    "{advice}",
    shown="export: …: output '…' for … rows is not that of eager mode: …",
    cause="the traced model computes something else",
    advice="follow the message; if the difference is only rounding, `--rtol`",
)

OTHER_SHAPE = Problem(
    "export.other_shape",
    ExportError,
    "export: {format}: output {name!r} for {rows} rows: wanted {wanted} as in eager mode, got {got}; nothing was kept",
    shown="export: …: output '…' for … rows: wanted … as in eager mode, got …",
    cause="the same, seen in a shape or a type",
    advice="the same",
)

OTHER_OUTPUTS = Problem(
    "export.other_outputs",
    ExportError,
    "export: {format}: wanted the outputs {wanted}, got {got}",
    cause="the same, seen in the names of the outputs",
    advice="the same",
)

NOT_LOADED = Problem(
    "export.not_loaded",
    ExportError,
    "export: {format}: what was written cannot be loaded again: {got}; nothing was kept",
    shown="export: …: what was written cannot be loaded again: …",
    cause="the same",
    advice="the same; or another format",
)

ROWS_FAIL = Problem(
    "export.rows_fail",
    ExportError,
    "export: {format}: the artifact fails on {rows} rows: {got}; nothing was kept",
    "{advice}",
    shown="export: …: the artifact fails on … rows: …",
    cause="the same",
    advice="the same; or another format",
)

OUTPUT_KIND = Problem(
    "export.output_kind",
    ExportError,
    "export: output {name!r} of the model is {got}, wanted a tensor, or a tuple or mapping of tensors",
    shown="export: output '…' of the model is …, wanted a tensor, …",
    cause="the model returns nested lists or something else",
    advice="return a tensor, or a tuple or a dict of tensors",
)

OUTPUT_DIMENSIONS = Problem(
    "export.output_dimensions",
    ExportError,
    "export: output {name!r} has another number of dimensions for other batch sizes",
    "squeeze by dimension in forward",
    cause="`squeeze()` drops the batch dimension of one row",
    advice="`squeeze` by dimension",
)

OTHER_WEIGHTS = Problem(
    "export.other_weights",
    ExportError,
    "export: {format}: read again, {got}; nothing was kept",
    cause="what was written has other weights, as where a library's `save_pretrained` ties or casts them",
    advice="follow the message; another format",
)

WEIGHTS_CHANGED = Problem(
    "export.weights_changed",
    ExportError,
    "weights: {file!r} has the digest {got}, and the run's record {wanted}",
    "restore the file",
    shown="weights: '…' has the digest …, and the run's record …",
    cause="the weights file was changed",
    advice="restore it",
)

ANOTHER_DESCRIPTION = Problem(
    "export.another_description",
    ExportError,
    "export: {file} is described as {got}, wanted {wanted}; nothing was kept",
    cause="the job's code changed the description of the artifact that it took part in making",
    advice="look at that code",
)

UNREADABLE = Problem(
    "export.unreadable",
    ExportError,
    "export: {file!r} cannot be read: {got}",
    "export it again",
    cause="the artifact was changed, or an export was cut short",
    advice="export it again",
)

CHANGED = Problem(
    "export.changed",
    ExportError,
    "export: {file!r} has the sha256 {got}, and {description} says {wanted}",
    "export it again",
    cause="the artifact was changed, or an export was cut short",
    advice="export it again",
)

CANNOT_RUN = Problem(
    "export.cannot_run",
    ExportError,
    "export: {file!r} is described as {got!r}, which cannot be run",
    "export it again",
    cause="its description was changed",
    advice="export it again",
)

OTHER_VERSION = Problem(
    "export.other_version",
    ExportError,
    "export: {file!r} cannot be loaded by {runtime}: {got}; it was exported with {wanted}",
    "export it again",
    shown="export: '…' cannot be loaded by …",
    cause="it was exported with another version",
    advice="export it again",
)

PREDICTION_FAILED = Problem(
    "predict.failed",
    ExportError,
    "predict: {format}: {rows} fail: {got}",
    shown="predict: …: rows … to … fail: …",
    cause="the artifact's runtime refuses these rows",
    advice="follow the message",
)

PREDICTION_SHAPE = Problem(
    "predict.shape",
    ExportError,
    "predict: {format}: {rows} have an output {name!r} of {got}, wanted {wanted} as of the rows before",
    "how many there are follows from the data, and outputs of several calls cannot be joined",
    cause="an output whose size follows from the data",
    advice="a `--batch` that takes all rows in one call",
)
