"""Install the three packages and their folders; neither tests nor benchmarks.

Python 3.14 waits for mwparserfromhell, which has no wheel for it (0.7.2).
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
PACKAGES = ("data_prep", "launch", "pretrain")

EXTRAS = {
    "fast": ["nanotoken>=0.1,<0.2"],
    "gcs": ["gcsfs"],
    "http": ["aiohttp>=3.9,<4"],
    # onnxruntime 1.23 is the last for Python 3.10, and pip takes it there.
    "onnx": ["onnx>=1.19,<2", "onnxruntime>=1.22,<2", "onnxscript>=0.5,<1"],
    "ray": ["ray>=2.30,<3"],
    "s3": ["s3fs"],
    "trackers": ["tensorboard>=2.15", "wandb>=0.19,<1"],
    "vectors": ["sentence-transformers>=5,<7"],
    "deepspeed": ["deepspeed>=0.16"],
}


class BuildPy(build_py):  # type: ignore[misc]
    """Copy configs/ into the wheel as launch/shipped/; a checkout reads configs/ itself."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "launch", "shipped")
            target.mkdir(parents=True, exist_ok=True)
            shutil.copytree(HERE / "configs", target, dirs_exist_ok=True)


setup(
    name="distil-pretraining",
    version="0.2.0",
    description="Make your own compact encoder: corpus, packed shards, distillation, export.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=[f"{name}{rest}" for name in PACKAGES for rest in ("", ".*")]),
    package_data={
        "data_prep": ["py.typed"],
        "launch": [
            "py.typed",
            "curves.json",
            "recipes/*.yaml",
            "accelerate/*.yaml",
            "deepspeed/*.json",
            "slurm/*.sbatch",
        ],
        "pretrain": ["py.typed"],
    },
    cmdclass={"build_py": BuildPy},
    entry_points={"console_scripts": ["distil=launch.cli:main"]},
    install_requires=[
        "accelerate>=1.10,<2",
        "charset-normalizer>=3,<4",
        "datasets>=4.0,<6",
        "fsspec>=2024.2",
        "huggingface_hub>=1.0,<3",
        "mwparserfromhell>=0.6.5,<0.8",
        "numpy>=2,<3",
        "psutil>=5.9",
        "py3langid>=0.4,<0.5",
        "pyarrow>=18",
        "pydantic>=2.8,<3",
        "PyYAML>=6,<7",
        "rensa>=0.5,<0.6",
        "rich>=13,<16",
        "safetensors>=0.8,<1",
        "tokenizers>=0.22,<0.24",
        "torch>=2.6,<3",
        "transformers>=5.10,<6",
        "typer>=0.12,<1",
        "xxhash>=3,<5",
        "zstandard>=0.22,<1",
    ],
    extras_require={
        **EXTRAS,
        "all": sorted({name for names in EXTRAS.values() for name in names}),
        "dev": [
            "aiohttp>=3.9,<4",
            "deepspeed>=0.16",
            "hypothesis>=6",
            "mypy>=1.15",
            "nanotoken>=0.1,<0.2",
            *EXTRAS["onnx"],
            # An S3 server for tests: its own extra `server` brings sixty packages.
            *EXTRAS["s3"],
            "flask>=3",
            "flask-cors>=5",
            "moto[s3]>=5",
            "pre-commit>=4",
            "pytest>=8",
            "pytest-xdist>=3.5",
            "ray>=2.30,<3",
            "ruff>=0.9",
            "scikit-learn>=1.5",
            "scipy>=1.13",
            *EXTRAS["vectors"],
            "seqeval>=1.2",
            "setuptools>=68",
            "torchmetrics>=1.4",
            *EXTRAS["trackers"],
            # torch brings it where it is built for GPUs; the tests interpret the kernels without.
            "triton>=3.2; sys_platform == 'linux'",
            "types-PyYAML",
        ],
    },
    classifiers=[
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
