"""Check that no file of the project unpickles data or evaluates text as code."""

import ast
from collections.abc import Iterator

import pytest
from support.processes import ROOT

FOLDERS = ("benchmarks", "data_prep", "launch", "pretrain")

MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "dill", "cloudpickle", "joblib", "jsonpickle"),
    *("marshal", "shelve", "xmlrpc", "socketserver"),
    *("multiprocessing.connection", "multiprocessing.managers"),  # pickles from whoever connects
    *("torch.distributed.checkpoint", "torch.distributed.rpc", "torch.package", "torch.hub"),
}
# Dotted names after imports are resolved. A mention is enough, because it could be called later.
NAMES = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *("torch.save", "torch.jit.load", "numpy.lib.format.read_array"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("multiprocessing.Manager", "shutil.unpack_archive"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("yaml.load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"),
    *("yaml.CLoader", "yaml.CUnsafeLoader", "yaml.CFullLoader"),
}
# Methods and functions of any object or module. The first six pickle objects between ranks.
ANYWHERE = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "read_pickle", "to_pickle"),
    # Accelerate's and DeepSpeed's checkpoints hold pickles.
    *("save_state", "load_state", "save_checkpoint", "load_checkpoint"),
    *("register_for_checkpointing",),
}
KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}


def forbidden(source: str) -> list[str]:
    """Return the forbidden names in a file, as `line: name`."""
    tree = ast.parse(source)
    return [f"{line}: {name}" for line, name in sorted(_findings(tree, _imported(tree)))]


def _imported(tree: ast.AST) -> dict[str, str]:
    """Map each imported name to its full name: np -> numpy, loads -> pickle.loads."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.split(".")[0]
                known[alias.asname or root] = root
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def _dotted(node: ast.AST | None, known: dict[str, str]) -> str:
    """Return the dotted name after imports (`np.load` -> numpy.load), or "" if it has none."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        root = _dotted(node.value, known)
        return f"{root}.{node.attr}" if root else f"?.{node.attr}"
    return ""


def _findings(tree: ast.AST, known: dict[str, str]) -> Iterator[tuple[int, str]]:
    safe = {"yaml.SafeLoader"}  # and the classes of this file that derive from it
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [_dotted(base, known) for base in node.bases]
            safe |= {node.name} if bases == ["yaml.SafeLoader"] else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = getattr(node, "module", None)
            for alias in node.names:
                name = f"{package}.{alias.name}" if package else alias.name
                inside = any(f"{name}.".startswith(f"{module}.") for module in MODULES)
                if inside or name in NAMES or _objects(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            pass  # a field or variable of that name
        elif isinstance(node, ast.Name | ast.Attribute):
            name = _dotted(node, known)
            if name in NAMES or ("." in name and name in MODULES) or _objects(name):
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and node.value in KEYWORDS - {"shell"}:
            yield node.lineno, str(node.value)  # a key of `**settings`
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in _calls(node, known, safe))


def _objects(name: str) -> bool:
    """Return True for a function of ANYWHERE that is not one of our own."""
    owner, _, last = name.rpartition(".")
    return last in ANYWHERE and owner != "" and owner.split(".")[0] not in FOLDERS


def _calls(node: ast.Call, known: dict[str, str], safe: set[str]) -> Iterator[str]:
    """Yield what is forbidden about a call because of its arguments."""
    name = _dotted(node.func, known)
    last = name.rpartition(".")[2]
    given = {keyword.arg: keyword.value for keyword in node.keywords}

    def constant(key: str) -> object:
        value = given.get(key)
        return value.value if isinstance(value, ast.Constant) else None

    yield from sorted(KEYWORDS & {key for key in given if key})
    if name == "torch.load" and "weights_only" not in given:
        yield name
    if "weights_only" in given and constant("weights_only") is not True:
        yield f"{name}(weights_only=...)"
    if name == "yaml.load" and _dotted(given.get("Loader"), known) not in safe:
        yield name
    unpacks = last == "extractall" or (last == "extract" and "tarfile" in known.values())
    if unpacks and constant("filter") != "data":
        yield name


FORBIDDEN = [
    "import pickle",
    "import pickle as harmless",
    "from pickle import loads",
    "import torch.distributed.checkpoint as dcp",
    "from torch.distributed import checkpoint",
    "from torch.distributed.checkpoint.state_dict import get_state_dict",
    *(f"import {name}" for name in ("dill", "cloudpickle", "joblib", "marshal", "shelve")),
    "from multiprocessing.connection import Listener",
    "import multiprocessing\nmultiprocessing.connection.Client(('host', 1))",
    "from multiprocessing import Manager",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=False)",
    "import torch\ntorch.load(path, weights_only=choice)",
    "import torch as t\nt.load(path)",
    "from torch import load as read\nread(path)",
    "import torch\ntorch.save(model, path)",
    "from torch import save",
    "load_state_dict(path, weights_only=False)",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "import numpy as np\nnp.load(path, allow_pickle=trusted)",
    "import pandas\npandas.read_pickle(path)",
    "import yaml\nyaml.load(text)",
    "import yaml\nyaml.load(text, Loader=yaml.Loader)",
    "import yaml\nyaml.load(text, yaml.FullLoader)",
    "import yaml\nyaml.unsafe_load(text)",
    "import yaml\nyaml.full_load(text)",
    "from yaml import load\nload(text)",
    "from yaml import unsafe_load",
    "import yaml\nclass Mine(yaml.UnsafeLoader): ...\nyaml.load(text, Loader=Mine)",
    "import yaml\nclass Mine(yaml.SafeLoader): ...\nyaml.load(text, Loader=Other)",
    "eval(text)",
    "exec(text)",
    "compile(text, 'x', 'exec')",
    "__import__(name)",
    "run = eval",
    "list(map(eval, texts))",
    "import os\nos.system(line)",
    "from os import system",
    "import os\nos.popen(line)",
    "import subprocess\nsubprocess.run(line, shell=True)",
    "from subprocess import Popen\nPopen(line, shell=choice)",
    "import subprocess\nsubprocess.getoutput(line)",
    "model = AutoModel.from_pretrained(name, trust_remote_code=True)",
    "settings = {'trust_remote_code': True}\nAutoModel.from_pretrained(name, **settings)",
    "import tarfile\ntarfile.open(path).extractall(folder)",
    "import tarfile\ntarfile.open(path).extractall(folder, filter='fully_trusted')",
    "import tarfile\narchive.extract(member, folder)",
    "import zipfile\nzipfile.ZipFile(path).extractall(folder)",
    "import shutil\nshutil.unpack_archive(path, folder)",
    "import torch\ntorch.distributed.all_gather_object(found, mine)",
    "import torch.distributed as dist\ndist.broadcast_object_list(values)",
    "from torch.distributed import gather_object",
    "from accelerate.utils import broadcast_object_list",
    "accelerator.save_state(folder)",
    "accelerator.load_state(folder)",
    "engine.load_checkpoint(folder)",
    "accelerator.register_for_checkpointing(order)",
]

ALLOWED = [
    "model.eval()",
    "import re\npattern = re.compile(text)",
    "class Train:\n    compile: bool = False",
    "import yaml\nyaml.safe_load(text)",
    "import yaml\nclass _Loader(yaml.SafeLoader): ...\nyaml.load(text, Loader=_Loader)",
    "import numpy as np\nnp.load(path, mmap_mode='r')",
    "import torch\ntorch.load(path, weights_only=True)",
    "import torch\ntorch.distributed.all_gather(found, mine)",
    "from transformers.modeling_utils import load_state_dict as f\nf(path, weights_only=True)",
    "def save_checkpoint(run): ...\nsave_checkpoint(run)",
    "from pretrain.run import save_checkpoint\nsave_checkpoint(run)",
    "import subprocess\nsubprocess.run(['ls', path])",
    "import tarfile\ntarfile.open(path).extractall(folder, filter='data')",
    "import multiprocessing\nmultiprocessing.get_context('spawn')",
    "text = 'never pickle or eval anything; the shell is not used'",
    "import torch.distributed as dist\ndist.all_reduce(x)",
    "from pretrain import checkpoint\ncheckpoint.save(run)",
]


@pytest.mark.parametrize("source", FORBIDDEN)
def test_checker_finds_forbidden_code(source: str) -> None:
    assert forbidden(source)


@pytest.mark.parametrize("source", ALLOWED)
def test_checker_accepts_allowed_code(source: str) -> None:
    assert forbidden(source) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_uses_forbidden_code(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(ROOT)): problems
        for file in files
        if (problems := forbidden(file.read_text(encoding="utf-8")))
    }
    # `distil vectors --trust-remote-code` hands the flag to sentence-transformers; it is off.
    asked = {"launch/commands/vectors.py", "pretrain/tasks/embedding/makers.py"}
    for file in asked & set(found):
        assert all(problem.endswith(": trust_remote_code") for problem in found.pop(file))
    assert found == {}


def test_from_pretrained_is_called_only_in_checked_places() -> None:
    """List the files that may call from_pretrained: they refuse code first, or wrote the folder."""
    places = {
        str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if ".from_pretrained(" in file.read_text(encoding="utf-8")
    }
    written_by_us = {"pretrain/model/folder.py"}
    written_by_us.add("pretrain/export/onnx/graph.py")  # the export, before it is renamed
    tokenizers = {f"data_prep/tokens/{name}.py" for name in ("agreement", "loading")}
    assert places == {*tokenizers, "pretrain/model/loading.py"} | written_by_us


def test_only_a_few_files_import_a_module_by_its_name() -> None:
    """The names are this project's own, the launcher's, and in own.py a config's."""
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))
        in ("import_module", "exec_module", "spec_from_file_location", "load_module", "runpy")
    }
    assert found == {
        *("pretrain/__init__.py", "pretrain/objectives/own.py", "pretrain/tasks/folders.py"),
        *("launch/torchrun/entry.py", "launch/torchrun/rank.py"),
    }
