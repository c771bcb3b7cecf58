"""What can be wrong with a job of lockstep.hf: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import DataError, Problem, SpecError

# --- models --------------------------------------------------------------------------------------------------

NOT_CAUSAL = Problem(
    "hf.not_causal",
    SpecError,
    "job.params: in {model} tokens attend to later tokens, which they should predict",
    "wanted a causal model (of some kinds, with is_decoder: true in its config)",
    cause="a model whose tokens see later ones",
    advice="a causal model, or `is_decoder: true` in its config",
)

NO_MASKS = Problem(
    "hf.no_masks",
    SpecError,
    "job.params.across_documents: {model} takes no document masks ({got})",
    "set it to true",
    cause="a model without masks of documents, with packed documents",
    advice="`across_documents: true`",
)

MASKS_UNUSED = Problem(
    "hf.masks_unused",
    SpecError,
    "job.params.across_documents: {model} does not look at document masks, so tokens would see other documents",
    "set it to true",
    cause="the same",
    advice="`across_documents: true`",
)

PACKED_DIFFER = Problem(
    "hf.packed_differ",
    SpecError,
    "job.params.across_documents: for {model} the logits of a document behind another one differ by {got} from those that it has alone, as where positions count from the beginning of a row, or a state goes on across documents",
    "set it to true",
    cause="a model that takes no notice of positions, or whose state goes on, with packed documents",
    advice="`across_documents: true`",
)

MASKS_DIFFER = Problem(
    "hf.masks_differ",
    SpecError,
    "job.params.across_documents: {model} computes something else with a document mask than by itself: the logits of one document differ by {got}, as with a window or positions of another kind",
    "set it to true",
    cause="a model with a window, or with positions of another kind",
    advice="`across_documents: true`",
)

OTHER_CLASSES = Problem(
    "hf.other_classes",
    SpecError,
    "job.params.classes: got {got}, but the outputs of the model in path are {wanted}",
    "leave classes out",
    cause="`classes` that are not those of the model in `path`",
    advice="leave `classes` out",
)

NO_PADDING = Problem(
    "hf.no_padding",
    SpecError,
    "job.params.tokenizer: it has no padding token, and the texts of a micro-batch are padded to one length",
    "set pad_token in its tokenizer_config.json",
    cause="a tokenizer without a padding token",
    advice="set `pad_token` in its `tokenizer_config.json`",
)

# --- classes -------------------------------------------------------------------------------------------------

TEXT_CLASS = Problem(
    "hf.text_class",
    DataError,
    "data: {source!r} has texts of class {got!r}, wanted {wanted}",
    cause="texts of a class that is none of the given ones",
    advice="add the class, or take the texts out",
)

# --- libraries -----------------------------------------------------------------------------------------------

LIBRARY_MISSING = Problem(
    "hf.library_missing",
    SpecError,
    "job.use: jobs of lockstep.hf need {name} ({got})",
    "pip install 'lockstep-train[hf]'",
    cause="the extra is missing",
    advice="`pip install 'lockstep-train[hf]'`",
)

# --- configurations ------------------------------------------------------------------------------------------

NO_AUTO_MODEL = Problem(
    "hf.no_auto_model",
    SpecError,
    "job.params.{param}: transformers makes no {kind} of it: {got}",
    cause="a `config` or `path` of a model of another kind",
    advice="a model of this kind",
)

PARAM_REFUSED = Problem(
    "hf.param_refused",
    SpecError,
    "job.params.{param}: {got}{hint}",
    cause="transformers refuses the config or the folder",
    advice="what its answer says",
)

ADAPTERS = Problem(
    "hf.adapters",
    SpecError,
    "job.params.path: {path!r} has adapters (adapter_config.json), wanted a model alone",
    "load them in peft, call merge_and_unload, and save_pretrained what it gives into another folder",
    cause="the folder has the adapters of a model, not a model",
    advice="merge them, and save what that gives",
)

OTHER_WEIGHTS = Problem(
    "hf.other_weights",
    SpecError,
    "job.params.path: the weights in {path!r} are not those of a {model}: {got}{more}",
    "wanted a folder as save_pretrained writes it, whole, with the architecture in its config.json",
    cause="weights that lack tensors, or are those of another architecture",
    advice="a folder as `save_pretrained` writes it",
)

VOCABULARY = Problem(
    "hf.vocabulary",
    SpecError,
    "job.params: the tokenizer has {tokens} tokens, and the model's vocab_size is {got}",
    "wanted at least as many",
    cause="the tokenizer has more tokens than the model",
    advice="another of the two",
)

POSITIONS = Problem(
    "hf.positions",
    SpecError,
    "job.params.length: got {got}, and the model has {wanted} positions",
    "wanted at most {wanted}",
    cause="texts longer than the model can take",
    advice="a smaller `length`",
)

LORA_TARGETS = Problem(
    "hf.lora_targets",
    SpecError,
    "job.params.lora.targets: {got}",
    cause="peft refuses the targets",
    advice="what its answer says",
)

NO_MODULE = Problem(
    "hf.no_module",
    SpecError,
    "job.params.lora.targets: the model has no module {target!r} for an adapter{hint}",
    cause="a misspelled target of adapters",
    advice="the suggested name",
)

NO_CONFIG_FIELD = Problem(
    "hf.no_config_field",
    SpecError,
    "job.params.config: a {config} has no field {name!r}{hint}",
    cause="a misspelled field of the model's config",
    advice="the suggested name",
)

# --- texts ---------------------------------------------------------------------------------------------------

NO_TEXTS = Problem(
    "hf.no_texts",
    DataError,
    "data: there is no file of texts at {path!r}",
    "wanted a file, a folder or a glob",
    cause="a wrong path, or a glob that matches nothing",
    advice="correct the path",
)

NO_LABELS = Problem(
    "hf.no_labels",
    DataError,
    "data: {file!r} has no rows with labels",
    "wanted {wanted} with {text!r} and {label!r}",
    cause="a file without rows of text and label",
    advice="one of the formats that the message names",
)

NO_COLUMN = Problem(
    "hf.no_column",
    DataError,
    "data: {file!r} has no column {column!r}{hint}",
    cause="a misspelled column",
    advice="the suggested name",
)

FIELD_COUNT = Problem(
    "hf.field_count",
    DataError,
    "data: row {row} of {file!r} has {got} fields, wanted {wanted}",
    "put a text with a comma into quotes",
    cause="a text with a comma that is not in quotes",
    advice="put it into quotes",
)

NO_TEXT = Problem(
    "hf.no_text",
    DataError,
    "data: row {row} of {file!r} has {got} as {column!r}, wanted text",
    cause="a field that holds something else than text",
    advice="write it as text",
)

TEXTS_UNREADABLE = Problem(
    "hf.texts_unreadable",
    DataError,
    "data: cannot read {file!r}: {got}",
    cause="a damaged file, or one in another encoding",
    advice="write it again, in UTF-8",
)

# --- tokenizers ----------------------------------------------------------------------------------------------

NO_TOKENIZER = Problem(
    "hf.no_tokenizer",
    SpecError,
    "job.params.tokenizer: got {got!r}, wanted a local folder with a tokenizer, or a tokenizer.json",
    "nothing is fetched from a hub",
    cause="a name of a hub, or a wrong path",
    advice="a local folder, or a `tokenizer.json`",
)

TOKENIZER_UNREADABLE = Problem(
    "hf.tokenizer_unreadable",
    SpecError,
    "job.params.tokenizer: {path!r} cannot be read by transformers: {got}",
    cause="a damaged tokenizer, or one of another version",
    advice="what its answer says",
)

NO_TOKEN = Problem(
    "hf.no_token",
    SpecError,
    "job.params.end: got {got!r}, which is no token of the tokenizer",
    cause="`end` is no token of the tokenizer",
    advice="one of its tokens",
)
