"""Change the keys of a sentence encoder's folder: refused, or read as by sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import VOCABULARY, tiny_bert, word_tokenizer

from data_prep import CorpusError
from pretrain import RunError
from pretrain.evaluation.encoders import load_encoder

library = pytest.importorskip("sentence_transformers")

TEXTS = [" ".join(VOCABULARY[5 + i : 9 + 3 * i]) for i in range(4)]
TEXTS[1] = TEXTS[1].upper()
MODULES, BERT = "modules.json", "sentence_bert_config.json"
SETTINGS, WORDS = "config_sentence_transformers.json", "tokenizer_config.json"
POOLING, DENSE, LAST = "1_Pooling/config.json", "2_Dense/config.json", "3_Normalize/config.json"
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
ACTIVATIONS = "torch.nn.modules.activation."
# (file, key): values that are refused, and values that are read.
TABLE: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {
    (SETTINGS, "default_prompt_name"): (["query"], [None, "document"]),
    (SETTINGS, "prompts"): ([], [{}, {"query": "abc "}]),
    (SETTINGS, "similarity_fn_name"): ([], ["dot", "euclidean", None]),
    (SETTINGS, "truncate_dim"): ([4], [None]),
    (SETTINGS, "model_type"): (["SparseEncoder", "CrossEncoder", None], ["SentenceTransformer"]),
    (SETTINGS, "requirements"): ([], [None]),
    (BERT, "max_seq_length"): ([], [4, 8, 16, None]),
    (BERT, "do_lower_case"): ([], [True, False]),
    (BERT, "transformer_task"): (["fill-mask", "text-generation"], []),
    (BERT, "modality_config"): ([{"text": {**FORWARD, "method_output_name": "pooler_output"}}], []),
    (BERT, "module_output_name"): (["sentence_embedding"], []),
    (BERT, "processing_kwargs"): ([{"text": {"max_length": 4}}], [None, {}]),
    (BERT, "unpad_inputs"): ([], [True, False, None]),
    (BERT, "query_length"): ([4], [None]),
    (BERT, "document_length"): ([4], [None]),
    (BERT, "query_expansion"): ([{"length": 8}], [None]),
    (POOLING, "pooling_mode"): (
        ["max", "lasttoken", "mean_sqrt_len_tokens", ["cls", "mean"], "x"],
        ["cls", ["cls"], "mean"],
    ),
    (POOLING, "include_prompt"): ([], [True, False]),
    (POOLING, "pooling_mode_max_tokens"): ([True], [False]),
    (DENSE, "activation_function"): (
        [ACTIVATIONS + "Softplus", "os.system"],
        [ACTIVATIONS + "ReLU", ACTIVATIONS + "GELU", "torch.nn.modules.linear.Identity"],
    ),
    (DENSE, "bias"): ([False], [True]),
    (DENSE, "in_features"): ([16], []),
    (DENSE, "out_features"): ([4], []),
    (DENSE, "module_input_name"): (["token_embeddings"], ["sentence_embedding"]),
    (DENSE, "module_output_name"): (["x"], [None]),
    (DENSE, "use_residual"): ([True], [False]),
    (LAST, "module_input_name"): (["token_embeddings"], []),
    (LAST, "module_output_name"): (["x"], []),
    (WORDS, "model_max_length"): ([], [4, 10**30]),
    (WORDS, "max_len"): ([], [4]),
    (WORDS, "truncation_side"): (["left"], ["right"]),
    (WORDS, "padding_side"): (["left"], ["right"]),
    (WORDS, "model_input_names"): ([["input_ids"]], [["input_ids", "attention_mask"]]),
    (WORDS, "tokenizer_class"): (["BertTokenizer"], ["PreTrainedTokenizerFast"]),
    (WORDS, "extra_special_tokens"): ([[VOCABULARY[6]]], [[]]),
    (WORDS, "sep_token"): ([], ["[MASK]"]),
    (WORDS, "do_lower_case"): ([], [False, True]),
    ("tokenizer.json", "truncation"): (
        [{"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 0}],
        [{"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}],
    ),
    ("sentence_xlnet_config.json", "max_seq_length"): ([], [4]),
    ("sentence_modernbert_config.json", "max_seq_length"): ([], [4]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all four modules."""
    from sentence_transformers.base import modules
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(4)
    place = tmp_path_factory.mktemp("sentences")
    tiny_bert(2).base_model.save_pretrained(place / "inner")
    word_tokenizer().save_pretrained(place / "inner")
    parts = [
        modules.Transformer(str(place / "inner"), max_seq_length=8),
        Pooling(32, pooling_mode="mean"),
        modules.Dense(32, 8),
        modules.Normalize(),
    ]
    prompts = {"query": "abc def: ", "document": ""}
    library.SentenceTransformer(modules=parts, prompts=prompts, device="cpu").save(
        str(place / "model")
    )
    return place / "model"


@pytest.mark.parametrize(("file", "key"), TABLE)
def test_a_key_is_refused_or_read(folder: Path, file: str, key: str) -> None:
    refused, read = TABLE[file, key]
    path = folder / file
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        for value in (*refused, *read):
            path.write_text(
                json.dumps({**json.loads(before or "{}"), key: value}), encoding="utf-8"
            )
            if value in refused:
                with pytest.raises((RunError, CorpusError)) as error:
                    load_encoder(str(folder))
                text = str(error.value)
                assert "\n" not in text and (key in text or file.partition("/")[0] in text)
                continue
            theirs = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
            found = load_encoder(str(folder))(TEXTS)
            np.testing.assert_allclose(found, theirs, atol=1e-6, err_msg=f"{value}")
    finally:
        path.unlink()
        if before:
            path.write_text(before, encoding="utf-8")
