"""Test recipes under `distil launch`: on one node, on two of a job of Slurm, and mistakes."""

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import DISTIL, ROOT, finished, in_a_process, outside_slurm, programs

from data_prep.shards import load_manifest

# A job of two nodes, both of which are this machine.
SBATCH = """#!/bin/bash
cat > "$LOG"
SLURM_JOB_ID=$$ SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST='n[1-2]' bash "$LOG"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=1 "$@" > "$LOG.1" 2>&1 &
SLURM_NODEID=0 "$@" > "$LOG.0" 2>&1
first=$?
wait $! && exit $first
"""
SCONTROL = '#!/bin/bash\n[[ $1 == show ]] && printf "127.0.0.1\\n127.0.0.1\\n"\n'


@pytest.fixture
def recipe(own_encoder: dict[str, Any], tmp_path: Path) -> Path:
    """Write the shipped recipe at tiny size, with a batch that two processes share."""
    own_encoder["defaults"]["train"]["global_batch_size"] = 16
    own_encoder["defaults"]["logging"] = {"every": 1}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(own_encoder, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_recipe_is_made_by_two_nodes_of_a_job(recipe: Path, tmp_path: Path) -> None:
    """The first node prepares, evaluates and exports; both train. On one node it is the same."""
    log, shared = tmp_path / "log", Path("runs/own-encoder")
    path = programs(tmp_path / "bin", sbatch=SBATCH, srun=SRUN, scontrol=SCONTROL, distil=DISTIL)
    environment = outside_slurm() | {"PATH": path, "PYTHONPATH": str(ROOT), "LOG": str(log)}
    environment |= {
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }
    argv = ["launch", recipe, "--slurm", "--nodes", "2", "--hardware", "cpu", "--public"]
    for state in ("new", "done"):
        code, out, err = in_a_process(*argv, env=environment)
        said = [Path(f"{log}.{node}").read_text(encoding="utf-8") for node in (0, 1)]
        assert code == 0, out + err + "\n".join(said)
        assert out.count(f"({state})") == 5
        assert "recipe.yaml" in log.read_text() and "--nodes=2" in log.read_text()
        assert "waiting for all 2 nodes" in said[0] + said[1]
        assert "2 node(s) x 1 process(es)" in said[0] and "2 node(s) x 1 process(es)" in said[1]
        assert "train: " in said[0] and "train: " not in said[1]  # the corpus
    digest = load_manifest(shared / "shards").digest
    exported = (shared / "exported" / "model.safetensors").read_bytes()

    shutil.move(shared, tmp_path / "of-nodes")
    done = finished(
        *(sys.executable, "-m", "launch", "launch", recipe, "--gpus", "2"),
        env=outside_slurm() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert load_manifest(shared / "shards").digest == digest
    assert (shared / "exported" / "model.safetensors").read_bytes() == exported


def test_slurm_is_asked_with_the_recipe_after_all_checks(recipe: Path, distil: Any) -> None:
    asked = ("launch", recipe, "--slurm", "--nodes", "2", "--gpus", "8", "--dry-run")
    code, out, err = distil(*asked, "slurm.time=5:00")
    assert code == 0, err
    assert out.count("(new)") == 5
    script = out[out.index("#!/bin/bash") :].splitlines()
    for option in ("--job-name=distil-recipe", "--nodes=2", "--gpus-per-node=8", "--time=5:00"):
        assert f"#SBATCH {option}" in script
    code, printed, err = distil(*asked[:-1], "slurm.time=5:00", "--print")
    assert code == 0 and printed.splitlines() == script, err
    code, out, err = distil(*asked, "runs.2.student.num_layers=9")
    assert code == 2 and "num_layers 9 is more than the teacher's 4" in err and "SBATCH" not in out
    code, _, err = distil(*asked, "runs.2.slurm.time=5:00")
    assert code == 2 and "runs.2.slurm: a recipe is one job; put it beside `runs`" in err
    code, _, err = distil(*asked, "runs.2.price_per_hour=2")
    assert code == 2 and "runs.2.price_per_hour: a recipe is one job" in err
    code, _, err = distil("launch", recipe, "--stop-after", "1")
    assert code == 2 and "--stop-after and --skip-rows are for one run" in err
    code, _, err = distil(
        "launch", recipe, "--hardware", "cpu", "defaults.train.global_batch_size=4"
    )
    assert code == 2 and "global_batch_size 4 is not a multiple of micro_batch_size 8" in err
    code, _, err = distil("launch", recipe, "--nodes", 2, "--node-rank", 0, "--head", "h:99999")
    assert code == 2 and "there is no port 99999" in err
    assert not Path("runs").exists()
    # Shards that the job's lines of setup bring are not here.
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["runs"] = [run for run in values["runs"] if run.get("stage", "train") == "train"][:1]
    staged = recipe.with_name("staged.json")
    staged.write_text(json.dumps(values), encoding="utf-8")
    job = ("launch", staged, "--slurm", "--hardware", "cpu")
    code, _, err = distil(*job)
    assert code == 2 and "holds no finished shards" in err
    code, out, err = distil(*job, "slurm.setup=[echo copied]", "--print")
    assert code == 0 and "echo copied" in out, err


@pytest.mark.slow
def test_a_node_whose_first_node_has_gone_ends(recipe: Path, tmp_path: Path) -> None:
    """Let the first node fail at its corpus, while the second one waits for it."""
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    texts = tmp_path / "texts.jsonl.gz"
    texts.write_bytes(gzip.compress(b'{"text": "some text"}')[:20])
    values["runs"][0]["sources"] = [{"kind": "jsonl", "path": str(texts)}]
    recipe.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    log = tmp_path / "log"
    path = programs(tmp_path / "bin", sbatch=SBATCH, srun=SRUN, scontrol=SCONTROL, distil=DISTIL)
    environment = outside_slurm() | {"PATH": path, "PYTHONPATH": str(ROOT), "LOG": str(log)}
    argv = ["launch", recipe, "--slurm", "--nodes", "2", "--hardware", "cpu", "--public"]
    code, out, err = in_a_process(*argv, env=environment)
    said = [Path(f"{log}.{node}").read_text(encoding="utf-8") for node in (0, 1)]
    assert code == 2, out + err + "\n".join(said)
    assert "texts.jsonl.gz: cut short or damaged" in said[0].splitlines()[-1]
    last = "error: the first node has ended run 1 with code 2"
    assert said[1].splitlines()[-1].startswith(last)
