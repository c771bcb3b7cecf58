"""What can be wrong with the data: each a row of docs/failures.md, and the line that is shown."""

from __future__ import annotations

from lockstep.errors import (
    ClusterError,
    DataError,
    DeterminismError,
    JobError,
    Problem,
    SpecError,
    StorageError,
)

# --- files ---------------------------------------------------------------------------------------------------

NO_FILE_OR_FOLDER = Problem(
    "data.no_file_or_folder",
    DataError,
    "data: there is no file or folder {path!r}",
    cause="an empty folder or prefix, or a glob that matches nothing",
    advice="correct the path",
)

CANNOT_LIST = Problem(
    "data.cannot_list",
    DataError,
    "data: cannot list {path!r}: {got}",
    cause="a wrong URI, or no access",
    advice="correct the URI or the permissions",
)

CANNOT_LOOK = Problem(
    "data.cannot_look",
    DataError,
    "data: cannot look into {path!r}: {got}",
    cause="a folder that this user may not read, or a storage that does not answer",
    advice="correct the permissions",
)

CANNOT_OPEN = Problem(
    "data.cannot_open",
    DataError,
    "data: cannot open {path!r}: {got}",
    cause="a wrong URI, or no access",
    advice="correct the URI or the permissions",
)

FILE_CHANGED = Problem(
    "data.file_changed",
    DataError,
    "data: {path!r} has changed since it was opened ({got}, where it had {size} bytes, written at {written}), so what is read of it would be of two versions",
    "leave data as they are while a run reads them, put the file back, and resume",
    cause="a data file was written while a run reads it",
    advice="put the file back and resume",
)

NO_FILES = Problem(
    "data.no_files",
    DataError,
    "data: there is no file for {path!r}",
    "wanted {wanted}, in a folder or by a glob",
    cause="an empty folder or prefix, or a glob that matches nothing",
    advice="correct the path",
)

FILE_GONE = Problem(
    "data.file_gone",
    DataError,
    "data: {what} is not there: {got}",
    cause="a file was moved or deleted after the run had listed it",
    advice="put it back",
)

UNREADABLE_STORAGE = Problem(
    "data.unreadable_storage",
    DataError,
    "data: cannot read {what}, tried {tries} times: {got}",
    "the storage is not well, or the file is damaged",
    cause="the disk or the network failed, or the pages are damaged",
    advice="check the disk or the network, or write the file again",
)

DAMAGED = Problem(
    "data.damaged",
    DataError,
    "data: cannot read {what}: {got}",
    "the file is damaged, cut short, or of another kind",
    cause="a damaged file",
    advice="write the file again",
)

# --- fingerprints --------------------------------------------------------------------------------------------

FINGERPRINT_CONTENT = Problem(
    "data.fingerprint_content",
    JobError,
    "data: fingerprint() of {dataset} gave for {name!r} a {kind}, whose content cannot be read ({reason})",
    "give text, numbers, arrays or objects that pickle takes",
    cause="a lock, an open file or a lambda",
    advice="give text, numbers, arrays or objects that pickle takes",
)

FINGERPRINT_KIND = Problem(
    "data.fingerprint_kind",
    JobError,
    "data: fingerprint() of {dataset} gave {got}, wanted a mapping",
    cause="`fingerprint()` of the dataset returned something else",
    advice="return a mapping",
)

SAMPLE_CONTENT = Problem(
    "data.sample_content",
    JobError,
    "data: {what} holds a {kind}, whose content cannot be read ({reason}), so a change of it would go unseen",
    "return tensors, arrays or objects that pickle takes, or give {dataset} a fingerprint()",
    shown="data: sample … holds a …, whose content cannot be read (…), so a change of it would go unseen; …",
    cause="a lock, an open file or a lambda in a sample",
    advice="return only data, or give the dataset a `fingerprint()`",
)

BATCH_CONTENT = Problem(
    "data.batch_content",
    JobError,
    "data: the first micro-batch holds a {kind}, whose content cannot be read ({reason}), so nothing shows whether it repeats",
    "collate to tensors, arrays or objects that pickle takes, or give the dataset a fingerprint()",
    cause="the same in a batch",
    advice="the same",
)

FETCHES_DIFFER = Problem(
    "data.fetches_differ",
    JobError,
    "data: the first micro-batch, fetched twice under one seed, differs{location}",
    "the dataset keeps something from one fetch to the next, draws in threads or draws from a generator of its own: draw from the default generators or from lockstep.rng(), in the thread that fetches",
    cause="a counter or a cache in the dataset, draws in the threads of a pool, or a generator that is out of sight",
    advice="draw from the default generators or `lockstep.rng()`; `determinism=fast` does not check",
)

# --- images --------------------------------------------------------------------------------------------------

OTHER_CLASS = Problem(
    "data.other_class",
    DataError,
    "data: {file!r} is of class {got!r}, wanted {wanted}",
    cause="an image in a folder whose name is none of the given `classes`",
    advice="move it, or give its class",
)

NO_IMAGE = Problem(
    "data.no_image",
    DataError,
    "data: {folder!r} holds no image ({got}); wanted {wanted}",
    "convert them, or give classes, the names of the folders that are classes",
    cause="a folder of an `ImageFolder` has files of other kinds, or none",
    advice="convert them, or name the classes",
)

PILLOW_MISSING = Problem(
    "data.pillow_missing",
    JobError,
    "data: images need Pillow ({got})",
    "pip install 'lockstep-train[images]'",
    cause="the extra is missing",
    advice="`pip install 'lockstep-train[images]'`",
)

NO_DECODABLE_IMAGE = Problem(
    "data.no_decodable_image",
    DataError,
    "data: {file!r} cannot be decoded: {got}",
    "the file is damaged, cut short, or no image",
    cause="a damaged file, or a file of another kind with the ending of an image",
    advice="write the file again, or take it out",
)

NO_CLASS_FOLDER = Problem(
    "data.no_class_folder",
    DataError,
    "data: {file!r} is in no class folder",
    "wanted a folder with a folder for each class",
    cause="an image that lies in no folder of a class",
    advice="a folder for each class",
)

# --- shards --------------------------------------------------------------------------------------------------

STREAMED = Problem(
    "data.streamed",
    JobError,
    "data: the litdata.StreamingDataset of {folder!r} is not on a disk, where a loader process reads any of its samples by index",
    "download it, and give the folder with its index.json",
    cause="a StreamingDataset of a remote folder",
    advice="download it",
)

# --- fetching ------------------------------------------------------------------------------------------------

PROCESSES_DIFFER = Problem(
    "data.processes_differ",
    SpecError,
    "data.loader_processes: got {got}, and {where}",
    "{advice}, or set it to 0",
    cause="samples or `collate` read [what training changes](data.md#who-fetches), such as an attribute that `after_step` sets, or the number of their process",
    advice="do it in `loss`, or `data.loader_processes=0`",
)

FETCHED_AHEAD = Problem(
    "data.fetched_ahead",
    DeterminismError,
    "data: {where}, for it was fetched ahead of its time",
    "{advice}",
    cause="samples or `collate` read what training changes; on CUDA each micro-batch is fetched before its step",
    advice="do it in `loss`",
)

PROCESSES_SLOW = Problem(
    "data.processes_slow",
    ClusterError,
    "data: loader processes did not begin within {limit_s} s, {tries} times",
    "the machine is overloaded: lower data.loader_processes",
    cause="the machine is overloaded, or importing the job takes long",
    advice="lower `data.loader_processes`",
)

PROCESS_LOST = Problem(
    "data.process_lost",
    ClusterError,
    "data: a loader process was lost: {got}",
    "often the machine is out of memory or shared memory: lower data.loader_processes or batch.micro",
    cause="the process was killed, usually because memory ran out",
    advice="lower `data.loader_processes` or `batch.micro`",
)

# --- tables on disk ------------------------------------------------------------------------------------------

ROWS_UNWRITABLE = Problem(
    "data.rows_unwritable",
    StorageError,
    "data: cannot write the rows of a table into {folder!r}: {got}",
    "make room, or set XDG_CACHE_HOME to a larger disk",
    cause="the folder of the cache is full, or not writable",
    advice="make room, or set `XDG_CACHE_HOME`",
)

# --- micro-batches -------------------------------------------------------------------------------------------

ATTRIBUTE_FAILED = Problem(
    "data.attribute_failed",
    JobError,
    "data: asking {dataset} whether it has a {name!r} failed{location}: {got}",
    "raise AttributeError in its __getattr__ for a name that it does not have, or mend its {name}",
    cause="a `__getattr__` or a property of the dataset raised another error than AttributeError",
    advice="raise AttributeError for a name that the dataset does not have",
)

OTHER_COUNT = Problem(
    "data.other_count",
    JobError,
    "data: {dataset}.__getitems__ returned {got} samples for {samples} ({where}), wanted {wanted}, one for each id and in their order",
    "leave a sample out with data.without",
    cause="a dataset that passes over broken samples: they would not be trained on, unseen",
    advice="one sample for each id; leave a broken one out with `data.without`",
)

DRAWS = Problem(
    "data.draws",
    JobError,
    "data: {dataset} says draws_nothing = True, and draws random numbers for {samples}: a thread would fetch them without their seed",
    "take draws_nothing out of it, or draw in collate",
    cause="a thread would fetch them, without the seed of their micro-batch",
    advice="take `draws_nothing` out of the dataset, or draw in `collate`",
)

NO_BATCH = Problem(
    "data.no_batch",
    JobError,
    "data: job.collate returned None for {samples} ({where}), wanted a batch: each sample counts once",
    "give a broken one no weight in the loss, or leave it out with data.without",
    cause="a `collate` that passes over broken samples: they would not be trained on, unseen",
    advice="give them no weight in the loss, or leave them out with `data.without`",
)

FETCH_FAILED = Problem(
    "data.fetch_failed",
    JobError,
    "data: {what} failed ({where}{location}): {kind}: {got}{forked}",
    shown="data: sample … failed (…): …`, `data: sample … (sample … of source '…') failed (…): …`, `data: samples … failed (…): …`, `data: the collation of samples … failed (…): …`, `…; a loader process cannot read what was open before it was forked (…): …`, `… WaitsForeverError: it waits for a thread of the process that this loader process was forked from; …",
    cause="`__getitem__`, `__getitems__` or `collate` raised an error for these ids; or what they use is [the worker's own](data.md#what-a-loader-process-inherits): a connection, a file that "
    "cannot be opened again, or a thread that the dataset started before",
    advice="fix the dataset at these ids; open and start what it uses where it is used, once for each process, or `data.loader_processes=0`",
)

FINGERPRINT_SAMPLE = Problem(
    "data.fingerprint_sample",
    JobError,
    "data: {what} failed, tried {tries} times{where}: {got}; the data are known by {samples} samples, of which this is one",
    "mend it, {leave_out}or give {name} a fingerprint()",
    shown="data: sample … failed, tried 4 times, …: …`, `data: sample … of source '…' failed, …`, `data: document … failed, …; the data are known by 16 samples, of which this is one; …",
    cause="`__getitem__` raised an error each time, before training; a DataError where a file could not be read",
    advice="mend the storage or the sample, leave it out by `data.without`, or give the dataset a `fingerprint()`",
)

# --- mixtures ------------------------------------------------------------------------------------------------

MIXTURE_SAMPLES = Problem(
    "data.mixture_samples",
    JobError,
    "data: Mixture got {got} samples for an epoch, wanted at least 1",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

MIXTURE_BLOCKS = Problem(
    "data.mixture_blocks",
    SpecError,
    "data.shuffle: got blocks, but a Mixture has none",
    "use data.shuffle=hashed",
    cause="a mixture has no blocks to shuffle",
    advice="`data.shuffle=hashed`",
)

MIXTURE_TABLE = Problem(
    "data.mixture_table",
    JobError,
    "data: Mixture's source {name!r} is a Table, which gives whole micro-batches",
    "wanted a dataset that gives samples, such as one that indexes the table's columns",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

MIXTURE_OF_MIXTURE = Problem(
    "data.mixture_of_mixture",
    JobError,
    "data: Mixture's source {name!r} is a Mixture itself, whose weights nothing would follow",
    "give its sources and their weights to one Mixture",
    cause="the order of the outer mixture takes each sample of a source once",
    advice="one `Mixture` with the sources of both, and the products of their weights; [mixtures](data.md#mixtures)",
)

MIXTURE_SUBSET = Problem(
    "data.mixture_subset",
    JobError,
    "data: got a Subset of a Mixture, which would give its samples in an order without the weights",
    "mix subsets of its sources: Mixture({{'name': Subset(source, indices), …}}, weights, samples)",
    cause="`random_split` or `Subset` of a mixture as training data",
    advice="a `Mixture` of subsets of its sources; [mixtures](data.md#mixtures)",
)

MIXTURE_SOURCE = Problem(
    "data.mixture_source",
    JobError,
    "data: Mixture's source {name!r} is {got}, wanted a map-style dataset (__len__ and __getitem__): a stream has no position to resume from",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

MIXTURE_FIRST_EPOCH = Problem(
    "data.mixture_first_epoch",
    JobError,
    "data: Mixture's weights begin with a later epoch, wanted some from epoch 0 on",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

MIXTURE_OTHER_SOURCES = Problem(
    "data.mixture_other_sources",
    JobError,
    "data: Mixture's weights are for {got}, wanted one for each of the sources {wanted}",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

MIXTURE_WEIGHTS = Problem(
    "data.mixture_weights",
    JobError,
    "data: Mixture's weights are {got}, wanted numbers of at least 0, not all of them 0",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

MIXTURE_EMPTY_SOURCE = Problem(
    "data.mixture_empty_source",
    JobError,
    "data: Mixture's source {name!r} holds no sample",
    "give it the weight 0, or leave it out",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

# --- memory of a node ----------------------------------------------------------------------------------------

MEMORY_UNWRITABLE = Problem(
    "data.memory_unwritable",
    StorageError,
    "data: cannot write shared memory in {path!r}: {got}",
    "give the node more (docker: --shm-size), or lower the table's memory_mb",
    cause="`/dev/shm` is too small",
    advice="a larger one (docker: `--shm-size`), `TMPDIR`, or a smaller `memory_mb`",
)

NO_ROOM = Problem(
    "data.no_room",
    StorageError,
    "data: neither {memory} nor {folder} has {required} free for what the processes of a node share",
    "make room, or set TMPDIR to a larger folder",
    cause="`/dev/shm` is too small",
    advice="a larger one (docker: `--shm-size`), `TMPDIR`, or a smaller `memory_mb`",
)

NO_LOCKS = Problem(
    "data.no_locks",
    StorageError,
    "data: no file can be locked on the file system of {folder!r} ({got})",
    "set TMPDIR to a folder on a local disk",
    cause="the folder for temporary files has no locks",
    advice="`TMPDIR` on a local disk",
)

# --- orders --------------------------------------------------------------------------------------------------

NO_BLOCKS = Problem(
    "data.no_blocks",
    SpecError,
    "data.shuffle: got blocks, but train_data has none (no block_sizes)",
    "use a table, or data.shuffle=hashed",
    cause="the dataset is not a table",
    advice="`data.shuffle=hashed`",
)

NO_LENGTHS = Problem(
    "data.lengths.none",
    JobError,
    "data.shuffle: got by_length, and neither job.lengths nor {name} says how long the samples are",
    "return them from job.lengths(data), a whole number for each sample, or give the dataset an attribute `lengths`",
    cause="samples are to be grouped by their lengths, which nothing knows",
    advice="`job.lengths(data)`, or an attribute `lengths` of the dataset",
)

LENGTHS_FORM = Problem(
    "data.lengths.form",
    JobError,
    "data: the lengths of {name} are {dtype} of shape {shape}, the least {least}, wanted {samples} whole numbers of at least 0, one for each sample",
    cause="lengths that are no whole numbers, or fewer or more than there are samples",
    advice="one whole number for each sample, in the order of the ids",
)

LENGTHS_OWN_ORDER = Problem(
    "data.lengths.own_order",
    SpecError,
    "data.shuffle: got by_length, and {name} has an order of its own",
    "have that order put samples of like lengths side by side (neighbours_together), and set data.shuffle=full",
    cause="a mixture, or a dataset with `epoch_order`, is to be ordered by length",
    advice="an order of its own that goes by length, with `neighbours_together`",
)

TOO_LONG = Problem(
    "batch.tokens.too_long",
    SpecError,
    "batch.tokens: got {got}, and sample {sample} has {length} tokens, as one of {count} that no micro-batch could hold",
    "raise batch.tokens, cut the samples, or leave them out by data.without",
    cause="a sample is longer than a micro-batch may be",
    advice="a higher `batch.tokens`, shorter samples, or `data.without`",
)

ORDER_KIND = Problem(
    "data.order_kind",
    JobError,
    "data: {what}: got {got}, wanted an array of the {samples} ids of the epoch, or an object whose slices are the ids at these positions",
    cause="an order with too few or too many ids, ids that no sample has, or no whole numbers",
    advice="one id for each of `len` positions; `id_count` where there are more samples than positions",
)

ORDER_CHANGES = Problem(
    "data.order_changes",
    JobError,
    "data: epoch_order of {dataset} gives other ids when it is asked for epoch {epoch} again, so a resume or another worker would visit other samples",
    "let the order follow from seed, epoch and position alone: draw from the default generators or from np.random.default_rng((seed, epoch)), and keep nothing from one call to the next",
    cause="an order that is drawn from a generator of its own, or from none",
    advice="draw from `np.random.default_rng((seed, epoch))` or the default generators",
)

ORDER_FOLLOWS_ASKING = Problem(
    "data.order_follows_asking",
    JobError,
    "data: epoch_order of {dataset} gives other ids for epoch 1 when it was not asked for epoch 0 before, so a run that is resumed there would visit other samples",
    "let the order follow from seed, epoch and position alone: draw from the default generators or from np.random.default_rng((seed, epoch)), and keep nothing from one call to the next",
    cause="an order that is drawn from a generator of the dataset and kept",
    advice="draw from `np.random.default_rng((seed, epoch))` or the default generators",
)

ORDER_FOLLOWS_TRAINING = Problem(
    "data.order_follows_training",
    JobError,
    "data: in step {step}, epoch_order of {dataset} gives other ids for epoch {epoch} than as its first micro-batches were asked for: it follows what training changes, so a resume would visit other samples",
    "let the order follow from seed and epoch; one that follows what training changes may do so in the last after_step of an epoch alone, from what the job's state_dict has, with data.loader_processes=0",
    cause="an order by losses or scores that each step changes",
    advice="change them in the last `after_step` of an epoch, keep them in `state_dict`, and fetch in the worker (`data.loader_processes=0`)",
)

ORDER_NO_ARRAY = Problem(
    "data.order_no_array",
    JobError,
    "{what}: no array of ids ({got})",
    "wanted {count} whole numbers",
    cause="an order with too few or too many ids, ids that no sample has, or no whole numbers",
    advice="one id for each of `len` positions; `id_count` where there are more samples than positions",
)

ORDER_SHAPE = Problem(
    "data.order_shape",
    JobError,
    "{what}: got an array of {dtype} of shape {shape}, wanted {count} ids, whole numbers in one dimension",
    cause="an order with too few or too many ids, ids that no sample has, or no whole numbers",
    advice="one id for each of `len` positions; `id_count` where there are more samples than positions",
)

ORDER_COUNT = Problem(
    "data.order_count",
    JobError,
    "{what}: got {got} ids, wanted {count}, one for each position of the {of}",
    "__len__ says how many samples an epoch has",
    cause="an order with too few or too many ids, ids that no sample has, or no whole numbers",
    advice="one id for each of `len` positions; `id_count` where there are more samples than positions",
)

ORDER_ID = Problem(
    "data.order_id",
    JobError,
    "{what}: got id {got}, wanted ids of 0 … {last}",
    "where an epoch is drawn from more samples than it has, give their number as id_count",
    cause="an order with too few or too many ids, ids that no sample has, or no whole numbers",
    advice="one id for each of `len` positions; `id_count` where there are more samples than positions",
)

# --- packed documents ----------------------------------------------------------------------------------------

PACKED_LENGTH = Problem(
    "data.packed_length",
    JobError,
    "data: Packed got rows of {got} tokens, wanted at least 1",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

PACKED_LENGTHS = Problem(
    "data.packed_lengths",
    JobError,
    "data: Packed got the lengths of {got} documents, wanted those of all {wanted}",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

DOCUMENT_LENGTH = Problem(
    "data.document_length",
    JobError,
    "data: document {document} has {got} tokens, but its given length is {wanted}",
    "give the lengths of these documents",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

DOCUMENT_KIND = Problem(
    "data.document_kind",
    JobError,
    "data: document {document} is a tensor of {dtype} of shape {shape}, wanted a row of whole numbers",
    cause="a document that is no row of token ids",
    advice="one dimension of whole numbers",
)

PACKED_SOURCE = Problem(
    "data.packed_source",
    JobError,
    "data: Packed got {got}, wanted a map-style dataset of documents (__len__ and __getitem__): a stream has no position to resume from",
    cause="sources, weights or documents that do not fit; a stream, which cannot be positioned",
    advice="follow the message; [mixtures](data.md#mixtures)",
)

# --- blocks --------------------------------------------------------------------------------------------------

BLOCK_SIZES = Problem(
    "data.block_sizes",
    JobError,
    "data: block_sizes of {name} are no whole numbers of at least 0",
    "wanted the number of samples of each block, in order",
    cause="`block_sizes` are fractions or negative",
    advice="the number of samples of each block",
)

BLOCK_TOTAL = Problem(
    "data.block_total",
    JobError,
    "data: block_sizes of {name} add up to {got}, but it has {wanted} samples",
    "wanted the number of samples of each block",
    cause="`block_sizes` and `__len__` disagree",
    advice="the number of samples of each block",
)

# --- versioned tables ----------------------------------------------------------------------------------------

NO_TABLE = Problem(
    "data.no_table",
    DataError,
    "data: cannot open the {format} table {path!r}: {got}",
    "give the place of a table that is there",
    cause="a wrong URI, no access, or a folder that is no such table",
    advice="correct the URI or the permissions",
)

NO_VERSION = Problem(
    "data.no_version",
    DataError,
    "data: version {version} of the {format} table {path!r} cannot be read: {got}",
    "a run that goes on reads the version that it began with: if it was vacuumed away, restore it, or start a new run, which takes the newest",
    cause="the version was vacuumed away, or its files are not readable",
    advice="restore it, or start a new run",
)

TABLE_LIBRARY = Problem(
    "data.table_library",
    SpecError,
    "data: {format} tables need a library that is not installed ({got})",
    "pip install 'lockstep-train[{extra}]'",
    cause="the extra is missing",
    advice="what the message says",
)

# --- columns -------------------------------------------------------------------------------------------------

LENGTH_GIVEN = Problem(
    "data.length_given",
    DataError,
    "data: column {column!r}: length is {got}, and each list of {source!r} has {wanted}",
    "leave length out",
    cause="the `length` of a `Column` and the list size of the file disagree",
    advice="leave `length` out",
)

COLUMN_KIND = Problem(
    "data.column_kind",
    DataError,
    "data: column {column!r} is {got}; wanted numbers, true and false, lists of numbers, binary or text",
    "convert it when the table is written",
    cause="dates, decimals, nested lists",
    advice="convert them when you write the table",
)

NO_DTYPE = Problem(
    "data.no_dtype",
    DataError,
    "data: column {column!r}: {got}",
    "wanted one such as float32",
    cause="the `dtype` of a `Column` does not fit",
    advice="a `dtype` that holds the values",
)

OTHER_DTYPE = Problem(
    "data.other_dtype",
    DataError,
    "data: column {column!r}: torch has no {got}",
    "wanted one such as float32",
    cause="the `dtype` of a `Column` does not fit",
    advice="a `dtype` that holds the values",
)

LOSSY = Problem(
    "data.lossy",
    DataError,
    "data: column {column!r} is {got} and does not become {wanted} without loss",
    cause="the `dtype` of a `Column` does not fit",
    advice="a `dtype` that holds the values",
)

PAD = Problem(
    "data.pad",
    DataError,
    "data: column {column!r}: pad is {got}, which {dtype} does not hold",
    "give a pad that it holds, or a dtype that holds the pad",
    cause="a `dtype` that is too narrow",
    advice="a wider `dtype`",
)

LIST_LENGTH = Problem(
    "data.list_length",
    DataError,
    "data: column {column!r} has a list of {got} in row {row} of {file!r}, row group {block}, wanted {wanted} in each",
    "leave length out for a padded tensor",
    cause="the `length` of a `Column` does not fit",
    advice="leave it out to get a padded tensor",
)

VALUE_LOST = Problem(
    "data.value_lost",
    DataError,
    "data: column {column!r} has {got} in row {row} of {file!r}, row group {block}, which {dtype} does not hold",
    "leave dtype out, or give one that does",
    cause="a `dtype` that is too narrow",
    advice="a wider `dtype`",
)

NULLS = Problem(
    "data.nulls",
    DataError,
    "data: column {column!r} has {count} null{plural} in {file!r}, row group {block}, and a tensor holds none",
    "fill them, or leave these rows out, when the table is written",
    cause="a column with nulls",
    advice="fill them, or leave out these rows",
)

# --- tables --------------------------------------------------------------------------------------------------

SEVERAL_KINDS = Problem(
    "data.several_kinds",
    DataError,
    "data: {path!r} holds files of several kinds ({got})",
    "wanted Parquet or Arrow alone",
    cause="Parquet next to Arrow",
    advice="a glob, or one folder for each kind",
)

OTHER_SCHEMA = Problem(
    "data.other_schema",
    DataError,
    "data: column {column!r} is {got} in {file!r} and {wanted} in {first!r}",
    "write all files of a table with one schema",
    cause="files with different schemas",
    advice="write them with one schema",
)

NO_COLUMN = Problem(
    "data.no_column",
    DataError,
    "data: {file!r} has no column {column!r}{hint}",
    cause="the message names the first file that lacks the column",
    advice="the suggested name",
)

COLUMN_UNREADABLE = Problem(
    "data.column_unreadable",
    DataError,
    "data: cannot read column {column!r} of {where}: {got}",
    "a list of a fixed size is null, or the file is damaged: write the column without nulls",
    cause="a null in a fixed-size list, in a file without statistics; or damage",
    advice="write the column without nulls",
)

NAME_TWICE = Problem(
    "data.name_twice",
    DataError,
    "data: {column!r} is a column, and the lengths of the lists in {source!r} have this name in a batch",
    "give one of the two another name in the table's columns",
    cause="a column has the name under which a batch has the lengths of another column's lists",
    advice="another name for one of the two",
)

TABLE_SHUFFLE = Problem(
    "data.table_shuffle",
    SpecError,
    "data.shuffle: got {got}, but train_data is {table}: each micro-batch would read blocks from all over it",
    "set data.shuffle=blocks, or give the table a larger memory_mb",
    cause="the order needs rows from all over a table that does not fit in memory",
    advice="`data.shuffle=blocks`, or a larger `memory_mb`",
)

WINDOW = Problem(
    "data.window",
    SpecError,
    "data.window: {window} blocks and the {window} after them take {needed} MiB of {table}",
    "lower data.window, write smaller row groups, or give the table a larger memory_mb",
    cause="the bound has no room for two windows",
    advice="a smaller window, smaller row groups, or a larger `memory_mb`",
)

# --- tar shards ----------------------------------------------------------------------------------------------

MEMBER_UNDECODABLE = Problem(
    "data.member_undecodable",
    DataError,
    "data: {sample}.{extension} in {file!r} cannot be decoded: {kind}: {got}",
    cause="a damaged member, or one of another kind than its extension says",
    advice="write the shard again",
)

MEMBER_TWICE = Problem(
    "data.member_twice",
    DataError,
    "data: {file!r} has {name!r} twice",
    "the members of a sample have one name and different extensions",
    cause="two members of a shard have the same name",
    advice="one name for each member",
)

SPARSE_MEMBER = Problem(
    "data.sparse_member",
    DataError,
    "data: {name!r} in {file!r} is a sparse file",
    "write it as a plain one",
    cause="the shard was written with tar's `--sparse`",
    advice="write it without",
)

NO_TAR = Problem(
    "data.no_tar",
    DataError,
    "data: {file!r} is not a complete tar file ({got})",
    "it is cut short, damaged or compressed: write it again, without compression",
    cause="a shard that is cut short, damaged or compressed",
    advice="write it again, without compression",
)
