"""Make the folders that later versions must verify and continue; run once, by the old version.

    python tests/support/promises.py

It writes a corpus of hashed text, a task's data, a teacher, an unfinished run of each objective, an
unfinished sweep, a pruned folder, an export with int8, and `expected.json`: what each run ends
with, its export's files, and the machine that computed them. Paths in the configs are relative to
tests/promises/, which tests copy.
"""

import json
import os
import platform
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM

HERE = Path(__file__).parents[1] / "promises"
WORDS = [f"{a}{b}{c}" for a in "bdfgl" for b in "aeiou" for c in "kprst"]
CORPUS_OBJECTIVES = ("distilbert", "embedding", "minilm", "mlm", "tinybert")
TASK_OBJECTIVES = ("finetune", "kd", "pkd", "theseus", "insights")
OBJECTIVES = (*CORPUS_OBJECTIVES, *TASK_OBJECTIVES)
SWEEP = ("sweep-seed0", "sweep-seed1")  # the second is not begun
STEPS, STOPPED = 8, 4
_SHARED: dict[str, Any] = {
    "shards": "shards",
    "teacher": "teacher",
    "student": {"num_layers": 2},
    "optimizer": {"learning_rate": 1e-3},
    "train": {
        "max_steps": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "precision": "fp32",
        "num_workers": 0,
    },
    "evaluation": {"rows": 8},
    "checkpoint": {"every": 0, "keep": 1},
    "logging": {"every": 1},
}
# A run of each objective; each masks, initialises or adapts in a way that others do not.
RUNS: dict[str, dict[str, Any]] = {
    "distilbert": {"masking": {"mode": "smoothed"}, "student": {"init": [0, 2]}},
    "embedding": {
        "objective": {"name": "embedding"},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
    },
    "minilm": {
        "objective": {"name": "minilm", "relation_heads": 4},
        "student": {"num_layers": 2, "init": "random", "hidden_size": 16},
    },
    "mlm": {
        "objective": {"name": "mlm"},
        "masking": {"mode": "whole_word"},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
    },
    "tinybert": {
        "objective": {"name": "tinybert"},
        "student": {"num_layers": 2, "init": "random", "hidden_size": 16},
    },
    "finetune": {"objective": {"name": "finetune"}, "model": {"init": "teacher"}},
    "kd": {"objective": {"name": "kd"}},
    "pkd": {"objective": {"name": "pkd", "layers": "skip"}},
    "theseus": {"objective": {"name": "theseus", "steps": 6}},
    "insights": {
        "objective": {"name": "insights", "logits": True, "hidden": True, "layers": [1, 3]}
    },
}
_TASK = {
    "shards": "task",
    "teacher": "runs/tuned",
    "task": {"name": "classification"},
    "student": {"architecture": "same", "num_layers": 2, "init": "teacher"},
}


def main() -> None:
    """Write everything below tests/promises/ again."""
    from launch.cli import app

    HERE.mkdir(exist_ok=True)
    os.chdir(HERE)
    for name in ("shards", "task", "teacher", "runs", "pruned", "exported", "expected.json"):
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def distil(*arguments: str) -> None:
        app([*arguments], standalone_mode=False)

    write_inputs()
    distil("prepare", "corpus.yaml")
    distil("recipe", "stages.yaml")
    distil("recipe", "sweep.yaml")
    for name in (f"runs/{SWEEP[1]}", "runs/sweep"):
        shutil.rmtree(name)
    for name in OBJECTIVES:
        distil("pretrain", f"{name}.yaml", "--stop-after", str(STOPPED))
    for path in Path("runs").glob("*/*.lock"):  # names the machine
        path.unlink()
    for path in Path("runs").glob("*/logs"):  # of a day
        shutil.rmtree(path)
    # What the runs end with is computed in a copy; the recipe finishes mlm, its first run.
    copy = HERE.with_name("promises-continued")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(HERE, copy)
    os.chdir(copy)
    for name in OBJECTIVES:
        if name != "mlm":
            distil("pretrain", f"{name}.yaml")
    distil("recipe", "recipe.yaml")
    distil("recipe", "sweep.yaml")
    runs = (*OBJECTIVES, "second", *SWEEP)
    for name in runs:
        distil("export", f"runs/{name}", f"exports/{name}")
    found = {
        "machine": machine(),
        "runs": {name: ends(copy, name) for name in runs},
        "exports": {name: exported(copy / "exports" / name) for name in runs},
        "stages": {name: exported(HERE / name) for name in ("pruned", "exported")},
    }
    (HERE / "expected.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(copy)


def write_inputs() -> None:
    """Write text, configs and teacher."""
    lines = (line(number) for number in range(300))
    Path("text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    Path("vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n", encoding="utf-8")
    corpus = {
        "output": "shards",
        "tokenizer": "vocab.txt",
        "row_length": 32,
        "sources": [{"kind": "text", "path": "text.txt", "document": "line"}],
        "validation": 0.1,
        "workers": 1,
    }
    rows = (f"{line(number)},{'ab'[number % 7 % 2]}" for number in range(300, 380))
    Path("labels.csv").write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    configs: dict[str, dict[str, Any]] = {"corpus": corpus}
    for name, own in RUNS.items():
        task = _TASK if name in TASK_OBJECTIVES else {}
        run = {**_SHARED, **task, **own, "output": f"runs/{name}"}
        if name in ("mlm", "finetune"):
            del run["teacher"]
        if "model" in own:
            del run["student"]
        configs[name] = run
    # Its first run is there, unfinished, and its second begins from that one.
    second = {**_SHARED, "output": "runs/second", "teacher": "runs/mlm", "student": {"init": [1]}}
    configs["recipe"] = {"runs": [configs["mlm"], second]}
    examples = {
        "stage": "examples",
        "output": "task",
        "task": {"name": "classification", "text": "text", "label": "label"},
        "train": "labels.csv",
        "validation": 0.2,
        "tokenizer": "teacher",
        "max_length": 32,
    }
    tuned = {**configs["finetune"], "output": "runs/tuned"}
    pruned = {"stage": "prune", "output": "pruned", "model": "runs/tuned", "shards": "task"}
    pruned |= {"heads": 1, "intermediate_size": 24, "rounds": 2}
    onnx = {"stage": "export", "output": "exported", "run": "runs/tuned", "int8": True}
    configs["stages"] = {"runs": [examples, tuned, pruned, {**onnx, "max_drop": 0.9}]}
    sweep = {"sweep": {"train.seed": [0, 1]}, "keep_weights": True, "output": "runs/sweep"}
    configs["sweep"] = {"runs": [{**configs["kd"], **sweep}]}
    for name, values in configs.items():
        own = json.loads(json.dumps(values))  # without YAML's aliases
        Path(f"{name}.yaml").write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
    config = BertConfig(
        vocab_size=len(special) + len(WORDS),
        hidden_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    teacher = BertForMaskedLM(config)
    fill(teacher)
    teacher.save_pretrained("teacher")
    shutil.copy("vocab.txt", "teacher")


def line(number: int) -> str:
    """Return 3 to 22 words, the first ones of the list more often."""
    draws = sha256(str(number).encode()).digest()
    count = 3 + draws[0] % 20
    return " ".join(WORDS[draws[i + 1] ** 2 * len(WORDS) >> 16] for i in range(count))


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Set weights uniform in +-0.3 (LayerNorm weights about 1), exact multiples of 2**-15."""
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        index = torch.arange(parameter.numel()) + 100_003 * number
        draw = (index * 2_654_435_761 % 2**32 >> 16).double() / 65536 - 0.5
        value = ((draw * 0.6 * 2**15).round() / 2**15).reshape(parameter.shape)
        parameter.copy_(value + float(name.endswith("LayerNorm.weight")))


def ends(folder: Path, name: str) -> dict[str, Any]:
    """Return what a finished run has written: losses, validation figures, digest of the weights."""
    run = folder / "runs" / name
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(each) for each in lines]
    figures = [e for e in entries if e["kind"] == "evaluation"][-1]
    digest = sha256()
    for path in sorted(run.glob(f"checkpoints/*{STEPS}/**/*.safetensors")):
        for key, tensor in sorted(load_file(path).items()):
            digest.update(f"{path.name} {key} {tensor.dtype} {[*tensor.shape]}\n".encode())
            digest.update(tensor.numpy().tobytes())
    return {
        "losses": [e["loss"] for e in entries if e["kind"] == "train"],
        "validation": {key: figures[key] for key in sorted(figures.keys() - {"kind", "step"})},
        "weights": digest.hexdigest(),
    }


def exported(folder: Path) -> dict[str, str]:
    """Return the digest of each file of an export but its card."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    digests = {str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest() for p in files}
    del digests["README.md"]
    return digests


def machine() -> dict[str, str]:
    """Return what the bits of a run depend on besides the project."""
    keys = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")
    found = {"processor": platform.processor()}
    cpus = Path("/proc/cpuinfo")
    for line in cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            found[key.strip()] = value.strip()
    text = json.dumps(found, sort_keys=True)
    return {
        "processor": sha256(text.encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
