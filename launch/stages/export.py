"""Export: write a run's student as a folder for transformers or sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.disk import hash_file
from data_prep.disk.json_files import canonical_sha256
from data_prep.messages import warn
from launch.commands import quiet
from launch.console import show
from launch.stage_keys import ExportKeys
from launch.stages.stage import How, Made, Stage, State, names_in, not_ours, real
from pretrain import RunError
from pretrain.contracts.process import ExitCode
from pretrain.export.asked import Onnx, check_onnx, check_packages, check_target
from pretrain.run_folder import check_model, check_run, is_run


class Export(Stage):
    """Write the newest checkpoint; an export with the same files is left as it is."""

    keys = ExportKeys

    @property
    def title(self) -> str:
        """Return which run it is of."""
        return f"export of {self.config.run}"

    def reads(self) -> dict[str, str]:
        """Return the run, and what ONNX files are measured on."""
        data = {} if self.config.data is None else {"data": str(self.config.data)}
        return {"run": str(self.config.run), **data}

    @property
    def onnx(self) -> Onnx | None:
        """Return the ONNX files that are asked for."""
        keys = self.config
        if not (keys.onnx or keys.int8 or keys.fp16):
            return None
        return Onnx(keys.int8, keys.fp16, keys.max_drop, keys.data)

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check the run, and that the target holds nothing but an export."""
        run, output = real(self.config.run), self.config.output
        if self.onnx is None and self.config.data is not None:
            raise RunError("data: is for ONNX files; add onnx: true or int8: true")
        if self.onnx is not None:
            check_packages()
        if run not in made:
            if self.onnx is None or is_run(self.config.run):
                check_run(self.config.run)
            else:
                check_model(self.config.run)
            if self.onnx is not None and (
                self.onnx.data is None or real(self.onnx.data) not in made
            ):
                check_onnx(self.config.run, self.onnx)
        check_target(self.config.run, output, again=True)
        held = names_in(output)
        if held and not {"config.json", "model.safetensors", "README.md"} <= set(held):
            raise not_ours(output, held[0], "export")
        return {real(output): made.get(run)}, [f"from: {self.config.run}"]

    def state(self) -> State:
        """Return whether an export is there: it is complete or absent."""
        return "done" if (self.config.output / "model.safetensors").exists() else "new"

    def run(self, how: How) -> int:
        """Export; with an export there, compare it with a new one."""
        from pretrain.export.export import export, export_model

        quiet()
        run, output, onnx = self.config.run, self.config.output, self.onnx
        onnx = check_onnx(run, onnx) if onnx is not None else None
        if onnx is not None and not is_run(run):
            exported = export_model(str(run), output, onnx, warn, show, same=contents)
        else:
            exported = export(run, output, warn, same=contents, onnx=onnx, say=show)
        show(
            f"{output}: {exported.architecture}, {exported.num_parameters:,} parameters, from "
            f"step {exported.step:,}{', up to date' if exported.kept else ''}"
        )
        return ExitCode.DONE


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of each file of an export that a user of the model reads.

    The card is none of them: it tells what was measured later, too. Nor is the version of the
    library that wrote a config.
    """
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "config.json":
            values = json.loads(path.read_bytes())
            values.pop("transformers_version", None)
            found[name] = canonical_sha256(values)
        elif name != "README.md":
            found[name] = hash_file(path)[0]
    return found
