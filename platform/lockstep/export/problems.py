"""What can be wrong with an export or its artifact: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import ExportError, JobError, Problem, SpecError, StorageError

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

FILE_SIZE = Problem(
    "export.file_size",
    SpecError,
    "max_file_size: got {got!r}, wanted a size such as 2GB or 500MiB",
    cause="a wrong `--max-file-size`",
    advice="a whole number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB",
)

FILE_SIZE_OF_ONE = Problem(
    "export.file_size_of_one",
    SpecError,
    "max_file_size: got {got!r} with format {format}, which is no set of files; export shards, or leave it out",
    cause="`--max-file-size` with another format than `shards`",
    advice="`--format shards`",
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

UNWRITABLE = Problem(
    "export.unwritable",
    StorageError,
    "export: cannot write {file!r}: {got}",
    "make the run's folder writable, or make room; an artifact that was there before is as it was",
    cause="the run's folder is not writable, or its disk is full",
    advice="the permissions, or room",
)

IN_THE_WAY = Problem(
    "export.in_the_way",
    StorageError,
    "export: {file!r} is {got}, and is in the way of the artifact",
    "move it away",
    cause="something else than an export has the name of an artifact, or of a folder that it goes into",
    advice="move it away",
)

FOLDER_GONE = Problem(
    "export.folder_gone",
    StorageError,
    "export: the run's folder {folder!r} is gone; nothing was kept",
    cause="somebody removed the run's folder while its model was exported",
    advice="bring the folder back, then export again",
)

NOT_PUT_BACK = Problem(
    "export.not_put_back",
    StorageError,
    "export: cannot write {file!r}: {got}; what was there before is in {folder!r}",
    "make the run's folder writable and export again: that puts it back first",
    cause="the disk failed while an artifact took the place of another, and when that was to be undone",
    advice="mend the disk and export again, which puts back what was there",
)

# --- the format -------------------------------------------------------------------------------------------------

FORMAT = Problem(
    "export.format",
    SpecError,
    "format: got {got!r}, wanted {wanted}",
    cause="a wrong `--format`",
    advice="one that the message names",
)

PACKAGES = Problem(
    "export.packages",
    SpecError,
    "format: {format} needs what is not installed ({got})",
    "pip install 'lockstep-train[{format}]', or choose another format",
    cause="the extra is missing",
    advice="install it, or another format",
)

SIZE = Problem(
    "export.size",
    SpecError,
    "format: the weights have {got} bytes, and a file of {format} holds less than 2 GiB",
    "export pt2",
    cause="a large model, and a format with a bound",
    advice="`--format pt2`",
)

NOT_PRETRAINED = Problem(
    "export.not_pretrained",
    SpecError,
    "format: pretrained is the form of the library that a model is from, and {got}",
    "export safetensors",
    cause="a model that is of no library with `save_pretrained`",
    advice="`--format safetensors`, or `save_pretrained` and `load_pretrained` in the job",
)

NO_PREDICTION = Problem(
    "predict.format",
    SpecError,
    "format: got {format}, which {why}",
    "predict from {wanted}",
    cause="a format that cannot be run on the rows of a file",
    advice="one that the message names",
)

# --- the example ------------------------------------------------------------------------------------------------

EXAMPLE_KIND = Problem(
    "job.example_input.kind",
    JobError,
    "job.example_input: got {got} among the arguments, wanted a tensor or a tuple of tensors",
    cause="`example_input` returns a list, a dict or something else",
    advice="a tensor or a tuple of tensors",
)

EXAMPLE_ROWS = Problem(
    "job.example_input.rows",
    JobError,
    "job.example_input: got a first argument {got}, wanted one with a row for each sample",
    "give two samples or more",
    cause="the first argument of `example_input` has no rows",
    advice="two samples or more",
)

# --- files of inputs and outputs --------------------------------------------------------------------------------

FILE_KIND = Problem(
    "predict.file_kind",
    SpecError,
    "{option}: got {got!r}, wanted a .npy, .npz or .safetensors",
    cause="the name of a file of inputs or outputs does not say which kind it is",
    advice="one of these endings",
)

INPUTS_UNREADABLE = Problem(
    "inputs.unreadable",
    SpecError,
    "inputs: {file!r} cannot be read: {got}",
    "give a file of arrays of numbers",
    cause="there is no such file, it is damaged, or it holds something else than numbers",
    advice="arrays of numbers, written with `numpy.save`, `numpy.savez` or safetensors",
)

INPUTS_WITHOUT_NAMES = Problem(
    "inputs.without_names",
    SpecError,
    "inputs: a .npy holds one array, and the model takes {wanted}",
    "give a .npz or .safetensors with these names",
    cause="a `.npy` for a model of several inputs",
    advice="a `.npz` or `.safetensors`",
)

INPUT_UNKNOWN = Problem(
    "inputs.unknown",
    SpecError,
    "inputs: the model has no input {got!r}{hint}",
    shown="inputs: the model has no input '…'; did you mean '…'?",
    cause="the file has an array under another name than the model's input",
    advice="the suggested name",
)

INPUT_MISSING = Problem(
    "inputs.missing",
    SpecError,
    "inputs: {name!r} is missing, wanted {wanted}",
    "add it to the file",
    cause="the file lacks an input of the model",
    advice="add it",
)

INPUT_DTYPE = Problem(
    "inputs.dtype",
    SpecError,
    "inputs: {name!r} is {got}, wanted {wanted}",
    "convert it when you write the file",
    cause="an input of another type than in training",
    advice="convert it when you write the file",
)

INPUT_SHAPE = Problem(
    "inputs.shape",
    SpecError,
    "inputs: {name!r} has the shape {got}, wanted {wanted}",
    cause="an input of another shape than in training",
    advice="the shape that the message names; any number of rows, unless it was exported with `--fixed-batch`",
)

INPUT_ROWS = Problem(
    "inputs.rows",
    SpecError,
    "inputs: got {got}, wanted the same number of rows in each, and at least one",
    cause="inputs of different lengths, or without a row",
    advice="a row in each for every sample",
)

OUTPUT_WITHOUT_NAMES = Problem(
    "output.without_names",
    SpecError,
    "output: a .npy holds one array, and the model gives {got}",
    "name a .npz or .safetensors",
    cause="`--output` with a `.npy`, of a model with several outputs",
    advice="a `.npz` or `.safetensors`",
)

OUTPUT_BFLOAT16 = Problem(
    "output.bfloat16",
    SpecError,
    "output: numpy has no bfloat16",
    "name a .safetensors",
    cause="`--output` with a `.npy` or `.npz`, of a model that gives bfloat16",
    advice="a `.safetensors`",
)

OUTPUT_UNWRITABLE = Problem(
    "output.unwritable",
    StorageError,
    "output: cannot write {file!r}: {got}",
    "name another with --output",
    cause="the folder of the outputs is not there or not writable, or its disk is full",
    advice="another `--output`",
)

FIXED_BATCH = Problem(
    "predict.fixed_batch",
    SpecError,
    "batch: got {got}, and the artifact takes {wanted} rows at a time",
    "leave out --batch",
    cause="`predict --batch` of an artifact that was exported with `--fixed-batch`",
    advice="leave it out",
)

WITHOUT_ROWS = Problem(
    "predict.without_rows",
    SpecError,
    "batch: output {name!r} has no row for each row of the inputs, so one call has to take all {rows}",
    "export without --fixed-batch and give --batch {rows}",
    cause="an output of all rows together, such as a mean, and more rows than one call takes",
    advice="all rows in one call",
)
