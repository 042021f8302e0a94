"""Run prepare.sbatch: a chain of job arrays must give the bytes of a plain run."""

import sys
from pathlib import Path

import pytest
from support.processes import DISTIL, ROOT, finished, in_a_process, outside_slurm, programs

from data_prep.shards import load_manifest

SCRIPT = ROOT / "launch" / "slurm" / "prepare.sbatch"
# Runs a job at once, as Slurm would later; refuses one whose dependency did not end well.
SBATCH = """#!/bin/bash
set -e
echo "$@" >> "$LOG"
options=()
while [[ $1 == --* ]]; do
    case $1 in
        --array=*) range=${1#--array=} ;;
        --dependency=afterok:*) [[ -e $LOG.${1##*:} ]] ;;
    esac
    shift
done
job=$(($(wc -l < "$LOG") + 100))
for ((task = ${range%-*}; task <= ${range#*-}; task++)); do
    SLURM_JOB_ID=$job SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_COUNT=${range#*-} \\
        SLURM_CPUS_PER_TASK=1 bash "$@" >> "$LOG.out" 2>&1
done
touch "$LOG.$job"
echo "$job;cluster"
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_chained_array_jobs_give_the_digest_of_one_run(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(4):
        text = "\n\n".join(f"paragraph {number} {i} of some plain text" for i in range(20))
        (texts / f"{number}.txt").write_text(text)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"output: {tmp_path}/shards\ntokenizer: {{train: {{vocab_size: 200}}}}\nrow_length: 32\n"
        f"sources: [{{kind: text, path: {texts}, document: paragraph}}]\nvalidation: 0.1\n"
    )
    path = programs(tmp_path / "bin", sbatch=SBATCH, distil=DISTIL)
    environment = outside_slurm() | {"PATH": path, "PYTHONPATH": str(ROOT)}
    environment["LOG"] = str(tmp_path / "log")
    done = finished("bash", SCRIPT, config, "2", "--partition=cpu", env=environment)
    output = (tmp_path / "log.out").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + output
    submitted = (tmp_path / "log").read_text().splitlines()
    assert len(submitted) == 7 and all("--partition=cpu" in line for line in submitted)
    plain = in_a_process("prepare", config, f"output={tmp_path}/plain", env=environment)
    assert plain[0] == 0, plain
    digests = {load_manifest(tmp_path / name).digest for name in ("shards", "plain")}
    assert len(digests) == 1
    usage = finished("bash", SCRIPT)
    assert usage.returncode == 2 and usage.stderr.startswith("usage: ")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_one_index_of_an_array_can_be_submitted_alone(tmp_path: Path) -> None:
    path = programs(tmp_path, distil='#!/bin/bash\necho "$@"\n')
    for stage, index, task in (("extract", "3", "3/16"), ("vocabulary", "1", "1/1")):
        environment = {
            **{"PATH": path, "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": index},
            "SLURM_ARRAY_TASK_COUNT": "1",  # sbatch --array=3
            **{"SLURM_ARRAY_TASK_MIN": index, "SLURM_ARRAY_TASK_MAX": index},
        }
        done = finished("bash", SCRIPT, "c.yaml", "16", stage, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"--stage {stage} --task {task}\n")
