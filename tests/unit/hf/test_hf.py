"""G1 for Hugging Face models in one process: transformers' own loss, adapters, what is saved, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep import train as train_run
from lockstep.calls.exporting import export
from lockstep.checkpoint.runs.run_folder import AttemptOrigin
from lockstep.data.order import epoch_order
from lockstep.errors import LockstepError, Problem, SpecError
from lockstep.hf import causal_lm, problems, text_files
from lockstep.hf.libraries import transformers
from lockstep.hf.tokens import Documents, Tokenizer
from lockstep.job.loading import load_job
from lockstep.randomness import model_key, seed_all
from lockstep.training.determinism import determinism
from lockstep.training.integrity.state_digest import weights_digest
from tests.distributed.kinds import RUN, taken_up
from tests.distributed.training import Document, train, train_attempt
from tests.raised import raises
from tests.unit.hf.made import BERT, GPT2, LLAMA, classifier, language_model, make


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hf"))


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def undropped(config: dict[str, Any]) -> dict[str, Any]:
    """Without dropout: a loop by hand draws from other seeds."""
    of_kind = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }
    return {**config, **dict.fromkeys(of_kind.get(config["model_type"], ()), 0.0)}


# --- transformers' own loss ---------------------------------------------------------------------------------------


def by_hand(document: Document) -> list[str]:
    """A loop as transformers' documentation writes it: the model's own loss of each batch, a mean; the weights after each step."""
    job: Any = load_job(document["job"]["use"], document["job"]["params"])
    digests = []
    with determinism("strict", threads=1):
        seed_all(model_key(document["seed"]))
        model = job.model().train()
        data, size = job.train_data(), document["batch"]["global"]
        order = epoch_order(document["seed"], 0, len(data), "full")[0 : 3 * size].tolist()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            batch = job.collate([data[i] for i in order[step * size : (step + 1) * size]])
            optimizer.zero_grad()
            model(**arguments(batch, document["job"]["params"])).loss.backward()
            optimizer.step()
            digests.append(weights_digest(model.state_dict()))
    return digests


def arguments(batch: dict[str, Tensor], params: dict[str, Any]) -> dict[str, Any]:
    """A batch as transformers takes it; labels are shifted there."""
    if "labels" in batch:
        return batch
    tokens = batch["tokens"]
    if params.get("across_documents"):
        return {"input_ids": tokens, "labels": tokens}
    return {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": batch["positions"],
        "attention_mask": (batch["documents"].unsqueeze(1) == batch["documents"].unsqueeze(2))
        .tril()
        .unsqueeze(1),
    }


def one_micro_batch(document: Document) -> Document:
    """Batches of a power of two, of which a mean rounds nothing; no clipping, which is done in another precision by hand."""
    return {
        **document,
        "length": {"steps": 3},
        "batch": {"global": 4, "micro": 4},
        "clip_norm": None,
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.01},
        "data": {},
    }


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("config", "across"),
    [
        pytest.param(GPT2, False, id="gpt2"),
        pytest.param(LLAMA, True, id="llama-across", marks=pytest.mark.exact),
        pytest.param(GPT2, True, id="gpt2-across", marks=pytest.mark.exact),
        pytest.param(LLAMA, False, id="llama", marks=pytest.mark.exact),
    ],
)
def test_the_loss_is_that_of_transformers(
    folder: Path, tmp_path: Path, config: dict[str, Any], across: bool
) -> None:
    """One document fills all rows, each of 33 tokens: 4 x 32 targets, as transformers counts them."""
    whole = " ".join(path.read_text() for path in sorted((folder / "train").iterdir()))
    (tmp_path / "one.txt").write_text(whole)
    document = one_micro_batch(
        language_model(folder, undropped(config), train=str(tmp_path / "one.txt"), across_documents=across)
    )
    assert list(train(document).digests) == by_hand(document)


@pytest.mark.exact
def test_the_loss_of_a_classifier_is_that_of_transformers(folder: Path) -> None:
    document = one_micro_batch(classifier(folder, undropped(BERT)))
    assert list(train(document).digests) == by_hand(document)


@pytest.mark.scenario
def test_texts_of_like_lengths_fall_into_one_micro_batch(folder: Path) -> None:
    """It is another run than one in the usual order; the tokens of a micro-batch may be bounded too."""
    document = {**classifier(folder), "length": {"epochs": 1}, "batch": {"global": 8, "micro": 4}}
    grouped = {**document, "data": {"shuffle": "by_length", "drop_last": False}}
    assert len(set(train(grouped).digests)) > 1
    assert train(grouped).identity != train({**document, "data": {"drop_last": False}}).identity
    bounded = {**grouped, "batch": {"global": 8, "micro": 4, "tokens": 4 * 32}}
    assert len(set(train(bounded).digests)) > 1


# --- what is seen, and what counts -----------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_sees_no_other_and_padding_does_not_count(folder: Path, attention: str) -> None:
    """The loss of a row of three parts and padding is that of its parts, each in a row of its own."""
    job: Any = load_job("lockstep.hf:CausalLM", language_model(folder, attention=attention)["job"]["params"])
    model = job.model().eval()
    parts = [torch.arange(3, 12), torch.arange(20, 31), torch.arange(40, 47)]
    row = {
        "tokens": torch.cat([*parts, torch.zeros(5, dtype=torch.int64)]),
        "documents": torch.tensor([0] * 9 + [1] * 11 + [2] * 7 + [-1] * 5),
        "positions": torch.cat([*map(torch.arange, (9, 11, 7, 5))]),
    }
    with torch.no_grad():
        together = job.loss(model, job.collate([row]))
        apart = [
            model(input_ids=part[None], labels=part[None]).loss.item() * (len(part) - 1) for part in parts
        ]
    assert together.weight == 8 + 10 + 6
    assert float(together.total) == pytest.approx(sum(apart), rel=1e-5)  # other shapes round otherwise


WINDOWED = {
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 5},
    "of two types": LLAMA
    | {
        "model_type": "gemma3_text",
        "head_dim": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", list(WINDOWED))
def test_a_window_is_that_of_the_model(folder: Path, kind: str, attention: str) -> None:
    """The logits of packed documents that are longer than the window are those of each by itself."""
    document = language_model(folder, WINDOWED[kind], attention=attention)
    job: Any = load_job("lockstep.hf:CausalLM", document["job"]["params"])
    model = job.model().eval()
    assert model.config.sliding_window == 5
    tokens, places = torch.arange(30).view(1, 30), torch.arange(30).view(1, 30)
    batch = {"tokens": tokens, "documents": places // 15, "positions": places % 15}
    with torch.no_grad():
        packed = job._logits(model, batch)
        apart = torch.cat([model(input_ids=part).logits for part in tokens.split(15, dim=1)], dim=1)
        other = torch.cat([tokens[:, :1] + 1, tokens[:, 1:]], dim=1)
        seen = (job._logits(model, {**batch, "tokens": other}) - packed).abs().amax((0, 2))
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-6)
    assert bool(seen[4] > 0) and not seen[15:].any()
    assert bool(seen[9:15].any()) == (
        kind == "of two types"
    )  # 2 layers of 4 tokens before each, or one of all


def test_a_model_that_computes_otherwise_with_a_mask_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with chunks of tokens; and the negative control: one with a window that the mask lacks. One that is longer than a row changes nothing."""
    chunks = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"} | {
        "model_type": "llama4_text", "head_dim": 4, "num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 32,
    }  # fmt: skip
    with raises(problems.MASKS_DIFFER):
        load_job("lockstep.hf:CausalLM", language_model(folder, chunks)["job"]["params"]).model()
    chunks["attention_chunk_size"] = 33
    load_job("lockstep.hf:CausalLM", language_model(folder, chunks)["job"]["params"]).model()
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 24}
    job = load_job("lockstep.hf:CausalLM", language_model(folder, mistral)["job"]["params"])
    job.model()
    with monkeypatch.context() as patched, raises(problems.MASKS_DIFFER):
        patched.setattr(
            causal_lm, "_mask", lambda model, documents: causal_lm._attention_mask(model, _plain(documents))
        )
        job.model()


def _plain(documents: Tensor) -> Tensor:
    return (documents.unsqueeze(1) == documents.unsqueeze(2)).tril().unsqueeze(1)


def test_every_token_but_the_first_of_a_part_is_a_target_once(folder: Path) -> None:
    job: Any = load_job("lockstep.hf:CausalLM", language_model(folder)["job"]["params"])
    data = job.train_data()
    batch = job.collate([data[i] for i in range(len(data))])
    parts = sum(len(data.pieces(row)) for row in range(len(data)))
    assert int((job._targets(batch) != -100).sum()) == data.tokens - parts


# --- state, memory ---------------------------------------------------------------------------------------------


@pytest.mark.exact
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder: Path, tmp_path: Path) -> None:
    """With dropout, and tied weights that are still one tensor."""
    whole = train(language_model(folder))
    saving = {**language_model(folder), "checkpoint": {"storage": str(tmp_path), "every": None}}
    train_attempt(saving, RUN, AttemptOrigin(), 2)
    rest = train_attempt(saving, RUN, taken_up(saving))
    assert rest.digests == whole.digests[2:]
    assert (rest.rows, rest.evaluations, rest.weights_digest) == (
        whole.rows,
        whole.evaluations,
        whole.weights_digest,
    )
    final = load_file(tmp_path / RUN / "weights" / "final.safetensors")
    assert torch.equal(final["lm_head.weight"], final["transformer.wte.weight"])


@pytest.mark.exact
def test_checkpointed_activations_change_no_bit(folder: Path) -> None:
    plain, less = (
        train({**language_model(folder), "activation_checkpointing": on, "length": {"steps": 1}})
        for on in (False, True)
    )
    assert plain.digests == less.digests


# --- identity --------------------------------------------------------------------------------------------------


def test_a_resume_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = Path(shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer"))
    spec = language_model(folder, tokenizer=str(tokenizer))
    spec |= {"checkpoint": {"storage": str(tmp_path / "runs"), "every": None}, "length": {"steps": 2}}
    first = train_attempt(spec, RUN, AttemptOrigin(), 1)
    moved = Path(shutil.copytree(tokenizer, tmp_path / "moved"))
    spec["job"]["params"]["tokenizer"] = str(moved)
    assert train_attempt(spec, RUN, taken_up(spec)).identity == first.identity
    changed = json.loads((moved / "tokenizer_config.json").read_text())
    (moved / "tokenizer_config.json").write_text(
        json.dumps({**changed, "clean_up_tokenization_spaces": True})
    )
    with pytest.raises(
        SpecError, match=r"^resume: job\.identity\.tokenizer is '\w{64}' and was '\w{64}' in the run"
    ):
        train_attempt(spec, RUN, taken_up(spec))


def test_texts_and_libraries_are_in_the_identity(folder: Path) -> None:
    job: Any = load_job("lockstep.hf:CausalLM", language_model(folder)["job"]["params"])
    assert {"transformers", "tokenizers", "peft", "config", "tokenizer"} == job.identity().keys()
    fields = job.train_data().fingerprint()
    assert len([name for name in fields if name.startswith("documents.file.")]) == 16


def test_files_of_one_name_in_several_folders_count_each(folder: Path, tmp_path: Path) -> None:
    """A glob names files without their folders. A change of one that does not count would also leave its old tokens in use."""
    for name, text in (("a", "one two three"), ("b", "four five six")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.txt").write_text(text)
    tokenizer = Tokenizer(str(folder / "tokenizer"))

    def read() -> Documents:
        return Documents(str(tmp_path / "*" / "part.txt"), tokenizer, text="text")

    before = read()
    (tmp_path / "a" / "part.txt").write_text("seven eight nine")
    after = read()
    assert after[0].tolist() != before[0].tolist()
    assert after.fingerprint() != before.fingerprint()


def test_the_order_of_files_counts_where_their_names_do_not_tell_it(tmp_path: Path) -> None:
    """A glob takes them by their folders: where these move, each id would be another text."""
    found = []
    for folders in ("ab", "cd", "fe"):
        for folder, name in zip(folders, "xy", strict=True):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / f"{name}.txt").write_text(name)
        files = text_files.find(str(tmp_path / f"[{folders}]" / "*.txt"))
        found.append(([row.text for row in text_files.read(files, "text")], text_files.digests(files)))
    (first, of_first), (alike, of_alike), (other, of_other) = found
    assert (first, first, of_first.keys()) == (alike, other[::-1], {"file.x.txt", "file.y.txt"})
    assert of_first == of_alike != of_other


# --- what is saved ---------------------------------------------------------------------------------------------


def recorded(document: Document, storage: Path) -> Path:
    """The folder of a run that came to its end."""
    saving = {"checkpoint": {"storage": str(storage)}, "record": {"uri": "off"}}
    return Path(train_run({**document, **saving}, local=True).folder)


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=tokens).logits
    return found


def exported(run: Path) -> Path:
    return Path(export(run.name, form="pretrained", uri="off", storage=run.parent).path)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a Llama-like model."""
    return recorded(language_model(folder, LLAMA), tmp_path_factory.mktemp("runs"))


@pytest.mark.exact
@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_shards(folder: Path, tmp_path: Path, tied: bool) -> None:
    """Several files with an index, and the `config.json` of the model beside them; with one matrix for embedding and head as well."""
    run = recorded(language_model(folder, {**LLAMA, "tie_word_embeddings": tied}), tmp_path)
    config = transformers().AutoConfig.from_pretrained(exported(run), local_files_only=True)
    assert config.tie_word_embeddings == tied
    found = export(run.name, form="shards", max_file_size="20KB", uri="off", storage=run.parent)
    assert len(list(Path(found.path).glob("model-*-of-*.safetensors"))) > 1
    config.save_pretrained(found.path)
    model = transformers().AutoModelForCausalLM.from_pretrained(
        found.path, local_files_only=True, dtype=torch.float32
    )
    assert weights_digest(model.state_dict()) == found.artifact.weights_digest
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.exact
def test_from_pretrained_gives_what_was_trained(folder: Path, trained: Path) -> None:
    saved = exported(trained)
    assert exported(trained) == saved  # over the one before
    model = transformers().AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    own = load_job("lockstep.hf:CausalLM", language_model(folder, LLAMA)["job"]["params"]).model()
    own.load_state_dict(load_file(trained / "weights" / "final.safetensors"))
    tokens = torch.arange(30).view(2, 15)
    assert torch.equal(logits(model, tokens), logits(own, tokens))
    told = json.loads(saved.with_suffix(".json").read_text())
    assert told["weights_digest"] == weights_digest(model.state_dict())
    text = "exact runs\n"
    both = (
        transformers().AutoTokenizer.from_pretrained(path)(text)["input_ids"]
        for path in (saved, folder / "tokenizer")
    )
    assert len({tuple(tokens) for tokens in both}) == 1


@pytest.mark.exact
def test_a_classifier_keeps_the_names_of_its_classes(folder: Path, tmp_path: Path) -> None:
    run = recorded(classifier(folder), tmp_path)
    model = transformers().AutoModelForSequenceClassification.from_pretrained(
        exported(run), local_files_only=True
    )
    assert model.config.id2label == {0: "start", 1: "within"}


@pytest.mark.parametrize(
    ("labels", "given", "classes", "named"),
    [
        (("start", "within"), None, ("within", "start", "after"), ("within", "start", "after")),
        (("0", "2"), None, ("0", "1", "2"), ("within", "start", "after")),
        (("ham", "spam"), None, ("ham", "spam"), ("ham", "spam")),
        (("start", "within"), ("start", "within"), ("start", "within"), ("start", "within")),
    ],
)
def test_a_classifier_in_a_folder_keeps_the_order_of_its_classes(
    folder: Path,
    tmp_path: Path,
    labels: tuple[str, str],
    given: tuple[str, ...] | None,
    classes: tuple[str, ...],
    named: tuple[str, ...],
) -> None:
    """Where the texts have their names or their numbers; else outputs that were trained would mean others."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "a text", "label": label}) + "\n" for label in labels))
    own = {0: "within", 1: "start", 2: "after"}
    config = transformers().AutoConfig.for_model(
        **BERT, vocab_size=300, id2label=own, label2id={name: i for i, name in own.items()}
    )
    transformers().AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    params = classifier(folder, path=str(tmp_path / "model"), train=str(texts), eval=None, classes=given)[
        "job"
    ]["params"]
    params.pop("config", None)
    job: Any = load_job("lockstep.hf:SequenceClassifier", params)
    assert job.classes == classes
    assert tuple(job._config().id2label.values()) == named
    params["classes"] = ("after", "start", "within")
    with raises(problems.OTHER_CLASSES, got="after, start, within"):
        load_job("lockstep.hf:SequenceClassifier", params)._config()  # type: ignore[attr-defined]


@pytest.mark.exact
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's, about transformers
def test_adapters_load_in_peft_with_the_same_logits(folder: Path, tmp_path: Path) -> None:
    """And what is frozen is in no optimizer and has not moved."""
    whole: Any = load_job("lockstep.hf:CausalLM", language_model(folder, LLAMA)["job"]["params"])
    base = tmp_path / "base"
    whole.save_pretrained(whole.model(), base)
    lora = {"r": 2, "alpha": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}
    document = language_model(folder, path=str(base), lora=lora)
    document["checkpoint"] = {"storage": str(tmp_path), "every": None}
    train_attempt(document, RUN, AttemptOrigin())
    job: Any = load_job("lockstep.hf:CausalLM", document["job"]["params"])
    own = job.model()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    own.load_state_dict(load_file(tmp_path / RUN / "weights" / "final.safetensors"))
    moved = {name for name, tensor in own.state_dict().items() if not torch.equal(tensor, before[name])}
    learnt = {name for name, parameter in own.named_parameters() if parameter.requires_grad}
    assert moved == learnt == {one for one in before if "lora" in one}
    assert len(learnt) == 2 * 2 * 2
    job.save_pretrained(own, tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("model*.safetensors"))
    assert weights_digest(job.load_pretrained(own, tmp_path / "saved").state_dict()) == weights_digest(
        own.state_dict()
    )
    from peft import PeftModel

    model = PeftModel.from_pretrained(
        transformers().AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved"
    )
    tokens = torch.arange(30).view(2, 15)
    assert torch.equal(logits(model, tokens), logits(own, tokens))
    assert not torch.equal(
        logits(model, tokens), logits(transformers().AutoModelForCausalLM.from_pretrained(base), tokens)
    )


@pytest.mark.scenario
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's, about transformers
def test_adapters_take_along_what_began_anew(folder: Path, tmp_path: Path) -> None:
    """A pooler that `path` has not, beside the head: whoever loads the adapters has the run's, and none of random values."""
    base = saved(tmp_path / "base", BERT, "AutoModelForMaskedLM")
    document = classifier(folder)
    document["job"]["params"] = {**of_folder(folder, base), "lora": {"r": 2, "targets": ["query"]}}
    run = recorded(document, tmp_path)
    job: Any = load_job("lockstep.hf:SequenceClassifier", document["job"]["params"])
    own = job.model()
    own.load_state_dict(load_file(run / "weights" / "final.safetensors"))
    from peft import PeftModel

    begun = transformers().AutoModelForSequenceClassification.from_pretrained(base)
    tokens = torch.arange(30).view(2, 15)
    assert torch.equal(logits(PeftModel.from_pretrained(begun, exported(run)), tokens), logits(own, tokens))


@pytest.mark.scenario
def test_weights_that_are_read_otherwise_are_no_artifact(folder: Path, tmp_path: Path) -> None:
    """The negative control of the comparison; the artifact of before stays."""
    document = language_model(folder, LLAMA)
    document["job"]["use"] = "tests.unit.hf.misread:MisreadCausalLM"
    run = recorded(document, tmp_path)
    saved = exported(run)
    before = sorted((path.name, path.read_bytes()) for path in saved.iterdir())
    misread = folder / "misread"
    misread.touch()
    try:
        with pytest.raises(
            LockstepError, match=r"^export: pretrained: read again, .* are other ones, such as 'lm_head"
        ):
            exported(run)
    finally:
        misread.unlink()
    assert sorted((path.name, path.read_bytes()) for path in saved.iterdir()) == before


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "problem", "facts"),
    [
        (
            {"path": "gpt2"},
            problems.PARAM_REFUSED,
            {
                "param": "path",
                "hint": re.compile("wanted a folder as of save_pretrained: nothing is fetched"),
            },
        ),
        ({"of_config": {"model_type": "gpt3"}}, problems.PARAM_REFUSED, {"param": "config"}),
        ({"kind": {"model_type": "vit"}}, problems.NO_AUTO_MODEL, {"param": "config"}),
        ({"of_config": {"vocab_size": 20}}, problems.VOCABULARY, {"tokens": 300, "got": 20}),
        ({"length": 65}, problems.POSITIONS, {"got": 65, "wanted": 64}),
        ({"tokenizer": "nowhere"}, problems.NO_TOKENIZER, {"got": "nowhere"}),
        ({"end": "<stop>"}, problems.NO_TOKEN, {"got": "<stop>"}),
        (
            {"of_config": {"n_hed": 2}},
            problems.NO_CONFIG_FIELD,
            {"config": "GPT2Config", "name": "n_hed", "hint": "; did you mean 'n_head'?"},
        ),
        (
            {"of_config": LLAMA | {"n_head": 2}},  # of another kind
            problems.NO_CONFIG_FIELD,
            {"config": "LlamaConfig"},
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    folder: Path, params: dict[str, Any], problem: Problem[SpecError], facts: dict[str, Any]
) -> None:
    with raises(problem, **facts) as raised:
        job = load_job("lockstep.hf:CausalLM", {**language_model(folder, **params)["job"]["params"]})
        job.model()
        job.train_data()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"config": None}, r"^job\.params: .*got neither of config and path"),
        ({"lora": {"r": 2}}, r"lora on a model from a config"),
    ],
)
def test_params_that_do_not_go_together_are_one_line(folder: Path, params: dict[str, Any], said: str) -> None:
    """They are refused where they are read, by the job's own Params."""
    with pytest.raises(SpecError, match=said):
        load_job("lockstep.hf:CausalLM", {**language_model(folder, **params)["job"]["params"]})


def saved(
    folder: Path, config: dict[str, Any], kind: str, change: Any = dict, architectures: Any = ...
) -> Path:
    """A folder as of save_pretrained, whose weights and architecture are then others."""
    own = transformers().AutoConfig.for_model(**{**config, "vocab_size": 300})
    getattr(transformers(), kind).from_config(own).save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    if architectures is not ...:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "architectures": architectures}))
    return folder


def without(*parts: str) -> Any:
    return lambda weights: {k: v for k, v in weights.items() if not any(part in k for part in parts)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda w: {f"net.{k}": v for k, v in w.items()},
            r"'lm_head\.weight' is missing, and \d+ more like it",
        ),
        (without("layers.1.mlp.up"), r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing; wanted a folder"),
        (
            lambda w: {**w, "other.weight": torch.ones(2)},
            r"'other\.weight' has no place in the model; wanted",
        ),
        (
            lambda w: {**w, "model.norm.weight": torch.ones(2)},
            r"'model\.norm\.weight' has the shape \(2,\), wanted \(16,\); wanted",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    folder: Path, tmp_path: Path, change: Any, said: str
) -> None:
    path = saved(tmp_path, LLAMA | {"tie_word_embeddings": False}, "AutoModelForCausalLM", change)
    with raises(problems.OTHER_WEIGHTS, model="LlamaForCausalLM") as raised:
        load_job("lockstep.hf:CausalLM", language_model(folder, path=str(path))["job"]["params"]).model()
    assert re.search(f"of a LlamaForCausalLM: {said}", str(raised.value))
    assert "\n" not in str(raised.value)


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks on the terminal whether to run it: neither a question nor an answer belongs into a run."""
    path = saved(tmp_path / "model", LLAMA, "AutoModelForCausalLM")
    config = json.loads((path / "config.json").read_text())
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}
    (path / "config.json").write_text(json.dumps({**config, **own}))
    (path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nfrom transformers import LlamaConfig\nclass Config(LlamaConfig): model_type = 'mine'\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with raises(problems.PARAM_REFUSED, param="path", got=re.compile("contains custom code")):
        load_job("lockstep.hf:CausalLM", language_model(folder, path=str(path))["job"]["params"]).model()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_a_folder_with_adapters_is_refused(folder: Path, tmp_path: Path, whole: bool) -> None:
    """Transformers reads them with the model, frozen; with `lora` they had been taken for the model's own weights, and been lost."""
    if whole:
        saved(tmp_path, LLAMA, "AutoModelForCausalLM")
    (tmp_path / "adapter_config.json").write_text("{}")
    params = language_model(folder, path=str(tmp_path))["job"]["params"]
    with raises(problems.ADAPTERS, path=tmp_path):
        load_job("lockstep.hf:CausalLM", params).model()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("config", "kind", "new"),
    [
        (BERT, "AutoModelForMaskedLM", ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier"]),
        (BERT, "AutoModelForPreTraining", ["classifier"]),
        (BERT, "AutoModel", ["classifier"]),
        (GPT2, "AutoModelForCausalLM", ["score"]),
        (LLAMA, "AutoModelForCausalLM", ["score"]),  # whose weights are tied
    ],
)
def test_a_new_head_is_told_and_nothing_else_is_new(
    folder: Path, tmp_path: Path, config: dict[str, Any], kind: str, new: list[str]
) -> None:
    job = load_job(
        "lockstep.hf:SequenceClassifier", of_folder(folder, saved(tmp_path / "whole", config, kind))
    )
    job.model()
    assert len(job._model_warnings) >= len(new)
    for told, name in zip(job._model_warnings, new, strict=False):
        assert told.startswith(f"job.params.path: {name!r}"[:-1]) and "it begins with random values" in told
    for number, (change, more) in enumerate(
        [
            (without("layer.1", "layers.1", "h.1."), {}),
            (lambda w: {**w, "other.weight": torch.ones(2)}, {}),
            (dict, {"architectures": None}),
        ]
    ):
        path = saved(tmp_path / str(number), config, kind, change, **more)
        with raises(problems.OTHER_WEIGHTS, path=path):
            load_job("lockstep.hf:SequenceClassifier", of_folder(folder, path)).model()


def of_folder(folder: Path, path: Path) -> dict[str, Any]:
    """The params of a classifier that begins with the weights in `path`."""
    params = classifier(folder, path=str(path))["job"]["params"]
    return {name: value for name, value in params.items() if name != "config"}


def test_a_new_head_is_among_the_warnings_of_a_run(folder: Path, tmp_path: Path) -> None:
    document = classifier(folder)
    document["job"]["params"] = of_folder(folder, saved(tmp_path / "model", GPT2, "AutoModelForCausalLM"))
    found = train_run(
        {**document, "checkpoint": {"storage": str(tmp_path)}, "record": {"uri": "off"}}, local=True
    )
    (told,) = [text for text in found.warnings if text.startswith("job.params.path")]
    assert "'score.weight' is not in" in told and "which holds a GPT2LMHeadModel" in told


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's, about transformers
def test_a_target_without_a_module_is_refused(folder: Path, tmp_path: Path) -> None:
    path = saved(tmp_path, LLAMA, "AutoModelForCausalLM")

    def made(targets: list[str]) -> None:
        lora = {"r": 2, "targets": targets}
        params = language_model(folder, path=str(path), lora=lora)["job"]["params"]
        load_job("lockstep.hf:CausalLM", params).model()

    made(["q_proj", "layers.1.self_attn.v_proj"])
    with raises(problems.NO_MODULE, target="v_porj", hint="; did you mean 'v_proj'?"):
        made(["q_proj", "v_porj"])
    with raises(problems.LORA_TARGETS):
        made(["input_layernorm"])  # no adapter is made for one


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (BERT, problems.NOT_CAUSAL),
        (
            {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
            problems.NO_MASKS,
        ),
    ],
    ids=["bert", "mamba"],
)
def test_a_model_that_sees_what_it_must_not_is_refused(
    folder: Path, config: dict[str, Any], problem: Problem[SpecError]
) -> None:
    with raises(problem):
        load_job("lockstep.hf:CausalLM", language_model(folder, config)["job"]["params"]).model()


@pytest.mark.parametrize("ending", [".JSONL", ".Csv"])
def test_the_ending_of_a_file_counts_in_any_letters(tmp_path: Path, ending: str) -> None:
    """It had been one text as a whole, with its braces and commas."""
    rows = {".JSONL": '{"text": "one"}\n{"text": "two"}\n', ".Csv": "text\none\ntwo\n"}
    (tmp_path / f"texts{ending}").write_text(rows[ending])
    found = text_files.read(text_files.find(str(tmp_path)), "text")
    assert [row.text for row in found] == ["one", "two"]


def test_a_row_with_more_fields_than_its_file_has_columns_is_refused(tmp_path: Path) -> None:
    """A comma in a text without quotes: what came after it had been cut off."""
    path = tmp_path / "texts.csv"
    path.write_text('text\n"one, two"\nthree, four\n')
    with raises(problems.FIELD_COUNT, row=2, file="texts.csv", got=2, wanted=1):
        list(text_files.read(text_files.find(str(path)), "text"))


def test_texts_that_cannot_be_read_are_one_line(folder: Path, tmp_path: Path) -> None:
    def opened(path: Path) -> None:
        load_job(
            "lockstep.hf:SequenceClassifier", classifier(folder, train=str(path))["job"]["params"]
        ).train_data()

    (tmp_path / "cut.jsonl").write_text('{"text": "a", "label": "b"}\n{"text": "c')
    with raises(problems.TEXTS_UNREADABLE, file=re.compile(r"cut\.jsonl$")):
        opened(tmp_path / "cut.jsonl")
    (tmp_path / "other.jsonl").write_text('{"body": "a", "label": "b"}\n')
    with raises(problems.NO_TEXT, row=1, file="other.jsonl", got="nothing", column="text"):
        opened(tmp_path / "other.jsonl")
    with raises(problems.NO_TEXTS, path=tmp_path / "nowhere"):
        opened(tmp_path / "nowhere")
    (tmp_path / "plain.txt").write_text("a text without a label")
    with raises(problems.NO_LABELS, file="plain.txt"):
        opened(tmp_path / "plain.txt")
    table = pyarrow.table({"txt": ["a"], "label": ["b"]})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    with raises(problems.NO_COLUMN, file="table.parquet", column="text", hint="; did you mean 'txt'?"):
        opened(tmp_path / "table.parquet")


def test_an_evaluation_with_a_class_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    """The model has no output for it."""
    (tmp_path / "other.jsonl").write_text('{"text": "a", "label": "elsewhere"}\n')
    params = classifier(folder, eval=str(tmp_path / "other.jsonl"))["job"]["params"]
    with raises(problems.TEXT_CLASS, got="elsewhere", wanted="start, within"):
        load_job("lockstep.hf:SequenceClassifier", params).eval_data()


def test_a_tokenizer_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    """A file that is none, and one without a token to pad texts with, which a classifier needs."""
    (tmp_path / "tokenizer.json").write_text("{}")
    params = language_model(folder, tokenizer=str(tmp_path / "tokenizer.json"))["job"]["params"]
    with raises(problems.TOKENIZER_UNREADABLE, path=tmp_path / "tokenizer.json"):
        load_job("lockstep.hf:CausalLM", params).train_data()
    single = str(folder / "tokenizer" / "tokenizer.json")
    params = classifier(folder, tokenizer=single)["job"]["params"]
    with raises(problems.NO_PADDING):
        job = load_job("lockstep.hf:SequenceClassifier", params)
        job.collate([job.train_data()[i] for i in (0, 1)])


def test_a_model_that_passes_masks_over_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would see other documents. Transformers has such models; this one is made of one that does look."""
    job = load_job("lockstep.hf:CausalLM", language_model(folder)["job"]["params"])
    model_of = transformers().GPT2LMHeadModel
    forward = model_of.forward

    def without_mask(
        self: Any, *args: Any, attention_mask: Any = None, position_ids: Any = None, **more: Any
    ) -> Any:
        return forward(self, *args, **more)

    monkeypatch.setattr(model_of, "forward", without_mask)
    with raises(problems.MASKS_UNUSED, model="GPT2LMHeadModel"):
        job.model()


def test_a_model_that_passes_positions_over_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would count those of a document from the beginning of its row, as kinds like Bart do."""
    job = load_job("lockstep.hf:CausalLM", language_model(folder)["job"]["params"])
    model_of = transformers().GPT2LMHeadModel
    forward = model_of.forward

    def without_positions(self: Any, *args: Any, position_ids: Any = None, **more: Any) -> Any:
        return forward(self, *args, **more)

    job.model()
    monkeypatch.setattr(model_of, "forward", without_positions)
    with raises(problems.PACKED_DIFFER, model="GPT2LMHeadModel"):
        job.model()


def test_a_field_of_a_config_that_does_not_fit_is_named(folder: Path) -> None:
    config = {
        "model_type": "modernbert-decoder", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    job: Any = load_job("lockstep.hf:CausalLM", language_model(folder, config)["job"]["params"])
    assert job.tokenizer.wrapped.bos_token_id is None
    with raises(
        problems.PARAM_REFUSED,
        param="config",
        got=re.compile("bos_token_id"),
        hint="; the tokenizer has no such token: give bos_token_id in config",
    ):
        job.model()
    given = config | {"bos_token_id": 0}
    load_job("lockstep.hf:CausalLM", language_model(folder, given)["job"]["params"]).model()
    wrong = language_model(folder, given | {"hidden_size": "16"})["job"]["params"]
    with raises(problems.PARAM_REFUSED, param="config", got=re.compile("hidden_size"), hint=""):
        load_job("lockstep.hf:CausalLM", wrong).model()


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises(problems.LIBRARY_MISSING, name="transformers"):
        transformers()
