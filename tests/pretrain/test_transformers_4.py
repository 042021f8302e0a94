"""Compare the export in transformers 4.57, which this project does not train with, and in 5.x."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import use_export
from support.families import CONFIGS, SPREAD, build
from support.tiny import as_teacher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import RobertaProcessing
from tokenizers.trainers import BpeTrainer
from transformers import DistilBertForMaskedLM

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from pretrain.config import RunConfig
from pretrain.export.export import body, export
from pretrain.model.folder import load_model
from pretrain.model.model_config import Student
from pretrain.model.student import build_student
from pretrain.shrink.prune import prune
from pretrain.train import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "tests" / "transformers-4.txt"
ENVIRONMENT = ROOT / ".venv-transformers-4"  # kept: to make it takes half a minute
TOLERANCE = 1e-5  # of logits, between versions; the export reads back within the same
POSITIONS = 48  # of the models; a row has fewer

TOKENIZERS: dict[str, Any] = {
    "uncased": {"train": {"vocab_size": 300}},
    "stripped": {"train": {"vocab_size": 300, "strip_accents": True}},
    "cased": {"train": {"vocab_size": 300, "lowercase": False}},
    "byte-level": "tokenizer.json",
}


@pytest.fixture(scope="module")
def python_4(installing: dict[str, str]) -> Path:
    """Return the interpreter of an environment with transformers 4.57 that shares torch alone."""
    ENVIRONMENT.mkdir(exist_ok=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT)}))
    python, made = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "made"
    torches = Path(torch.__file__).parents[1]
    wanted = f"{REQUIREMENTS.read_text()}{sys.version}\n{torches} {torch.__version__}\n"
    with (ENVIRONMENT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may want it at the same time
        if not made.is_file() or made.read_text() != wanted:
            make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT)]
            subprocess.run(make, check=True, timeout=600)
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
            install = [*pip, "--no-deps", "-r", str(REQUIREMENTS)]
            subprocess.run(install, check=True, timeout=600, env=os.environ | installing)
            for name in ("torch", "torchgen", "functorch", f"torch-{torch.__version__}.dist-info"):
                (site / name).symlink_to(torches / name)
            made.write_text(wanted)
    return python


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder for each tokenizer with `shards`, two runs, exports and a pruned one."""
    folders = {}
    for name, tokenizer in TOKENIZERS.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        lines = [f"{text} {i} words {i * 7919}" for i in range(60) for text in use_export.TEXTS]
        (folder / "texts.txt").write_text("\n\n".join(lines), encoding="utf-8")
        if tokenizer == "tokenizer.json":
            tokenizer = byte_level(folder / tokenizer)
        source = {"kind": "text", "path": str(folder / "texts.txt"), "document": "paragraph"}
        corpus = {
            "output": folder / "shards",
            "sources": [source],
            "tokenizer": tokenizer,
            "row_length": 32,
            "workers": 1,
            "deduplicate": {"documents": "none"},
        }
        prepare(CorpusConfig.model_validate(corpus))
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        mlm = {
            "objective": {"name": "mlm"},
            "model": {**sizes, "intermediate_size": 64, "max_position_embeddings": POSITIONS},
        }
        distil = {"teacher": str(folder / "teacher-exported")}
        for run, settings in {"teacher": mlm, "student": distil}.items():
            rows = {"global_batch_size": 4, "micro_batch_size": 4}
            values = {
                "output": folder / run,
                "shards": folder / "shards",
                "train": {"max_steps": 2, "num_workers": 0, **rows},
                "optimizer": {"learning_rate": 0.01},
                "evaluation": {"rows": 4},
            }
            train(RunConfig.model_validate(values | settings))
            export(folder / run, folder / f"{run}-exported", pytest.fail)
        places = str(folder / "student-exported"), folder / "shards", folder / "pruned-exported"
        sizes = {"heads": 2, "intermediate_size": 40, "even_heads": False, "rounds": 2}
        prune(*places, **sizes, importance="self-supervised", documents=9, seed=0, say=print)
    return folders


def byte_level(path: Path) -> str:
    """Write a byte-level BPE with RoBERTa's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)]
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(use_export.TEXTS * 9, trainer)
    tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(path))
    return str(path)


def in_4(python: Path, *folders: Path, ask: str = "answers") -> list[dict[str, Any]]:
    """Return the answers of transformers 4.57, none of whose modules is this environment's."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    code = "import importlib.util as u; print([n for n in ('accelerate', 'data_prep', 'datasets', "
    code += "'pretrain', 'pydantic', 'rich') if u.find_spec(n)])"
    ran = [
        subprocess.run(
            [str(python), *arguments],
            cwd="/",
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        ).stdout
        for arguments in (["-c", code], [use_export.__file__, ask, *map(str, folders)])
    ]
    assert ran[0] == "[]\n"
    found: list[dict[str, Any]] = json.loads(ran[1])
    assert all(each["version"].startswith("4.57.") for each in found)
    return found


@pytest.mark.parametrize("model", ["teacher", "student", "pruned"])
def test_an_export_is_the_same_in_4_and_5(
    exports: dict[str, Path], python_4: Path, model: str
) -> None:
    folders = [folder / f"{model}-exported" for folder in exports.values()]
    for old, folder in zip(in_4(python_4, *folders), folders, strict=True):
        new = use_export.answers(str(folder))
        assert new["version"].startswith("5.")
        backend = Tokenizer.from_file(str(folder.parent / "shards/tokenizer/tokenizer.json"))
        assert old["ids"] == new["ids"] == [backend.encode(text).ids for text in use_export.TEXTS]
        assert old["pair"] == new["pair"] == backend.encode("hello", "world").ids
        assert old["inputs"] == new["inputs"] == ["input_ids", "attention_mask"]
        # A class of 5 alone, such as TokenizersBackend, would load in 5 only.
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert settings["tokenizer_class"] == old["tokenizer"] == "PreTrainedTokenizerFast"
        assert old["max_length"] == new["max_length"] == POSITIONS
        for theirs, ours in zip(old["logits"], new["logits"], strict=True):
            np.testing.assert_allclose(theirs, ours, rtol=0, atol=TOLERANCE)
        assert [each["token"] for each in old["fill"]] == [each["token"] for each in new["fill"]]
        for theirs, ours in zip(old["fill"], new["fill"], strict=True):
            assert theirs["token_str"] == ours["token_str"]
            assert theirs["sequence"] == ours["sequence"]
            assert theirs["score"] == pytest.approx(ours["score"], rel=1e-4)


def test_a_checkpoint_is_the_same_in_4_and_5(exports: dict[str, Path], python_4: Path) -> None:
    folders = [folder / "student/checkpoints/step-00000002/student" for folder in exports.values()]
    for old, folder in zip(in_4(python_4, *folders), folders, strict=True):
        model = DistilBertForMaskedLM.from_pretrained(folder).eval()
        for ids, logits in zip(old["ids"], old["logits"], strict=True):
            with torch.no_grad():
                ours = model(torch.tensor([ids])).logits[0]
            np.testing.assert_allclose(logits, ours.numpy(), rtol=0, atol=TOLERANCE)


# What one version names otherwise, or has no more: none of it changes an output.
NOT_SETTINGS = {
    *("transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures"),
}
OTHERWISE = NOT_SETTINGS | {
    *("rope_parameters", "rope_scaling", "layer_types"),
}


def test_every_family_is_the_same_in_4_and_5(tmp_path: Path, python_4: Path) -> None:
    """Save a teacher and its student of each family, and load both in both versions."""
    folders, bodies = [], []
    for kind in CONFIGS:
        model = build(kind)
        model.save_pretrained(tmp_path / kind / "plain")  # as transformers saves it
        if kind == "modernbert":
            # Transformers 5 writes the kinds of layers alone, of which 4.57 reads nothing.
            path = tmp_path / kind / "plain" / "config.json"
            values = json.loads(path.read_text(encoding="utf-8"))
            assert values.pop("global_attn_every_n_layers") == 2 and "layer_types" in values
            path.write_text(json.dumps(values), encoding="utf-8")
        loaded = load_model(tmp_path / kind / "plain")
        loaded.save_pretrained(tmp_path / kind / "teacher")
        student = build_student(Student(architecture="same"), as_teacher(loaded), seed=0)
        student.save_pretrained(tmp_path / kind / "student")
        student.base_model.save_pretrained(tmp_path / kind / "body")  # as one without a head
        bodies.append(tmp_path / kind / "body")
        files = [tmp_path / kind / name / "model.safetensors" for name in ("plain", "teacher")]
        plain, ours = map(load_file, files)
        assert plain.keys() == ours.keys() and len({file.stat().st_size for file in files}) == 1
        assert all(plain[name].equal(ours[name]) for name in ours)
        folders += [tmp_path / kind / "teacher", tmp_path / kind / "student"]
        bodies.append(tmp_path / kind / "body")
        body(student, seed=0).save_pretrained(bodies[-1])
    for old, folder in zip(in_4(python_4, *bodies, ask="model"), bodies, strict=True):
        assert old["missing_body"] == use_export.model_answers(str(folder))["missing_body"] == []
    for old, folder in zip(in_4(python_4, *folders, ask="model"), folders, strict=True):
        new = use_export.model_answers(str(folder))
        assert np.std(new["logits"]) > SPREAD, folder
        np.testing.assert_allclose(old["logits"], new["logits"], rtol=0, atol=1e-4, err_msg=folder)
        assert old["missing"] == new["missing"] == [], folder
        # A model with a head has no pooler.
        for missing in (old["missing_body"], new["missing_body"]):
            assert all("pooler" in name for name in missing), folder
        # Each version loads every key that it knows with the value that was saved.
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for version in (old, new):
            known = saved.keys() & version["config"].keys() - NOT_SETTINGS
            assert len(known) > 12, known
            for key in known:
                assert saved[key] == version["config"][key], f"{folder}: {key}"
        both = old["config"].keys() & new["config"].keys() - OTHERWISE
        assert {"vocab_size", "num_hidden_layers"} <= both or "distilbert" in str(folder)
        for key in both:
            assert old["config"][key] == new["config"][key], f"{folder}: {key}"
    for old, folder in zip(in_4(python_4, *bodies, ask="body"), bodies, strict=True):
        new = use_export.body_answers(str(folder))
        assert old["missing"] == new["missing"] == [], folder
        assert np.std(new["hidden"]) > 0.5, folder
        np.testing.assert_allclose(old["hidden"], new["hidden"], rtol=0, atol=1e-4)
