"""Packages are listed by hand: find_packages() would install the tests."""

from pathlib import Path

from setuptools import setup

setup(
    name="distil-pretraining",
    version="0.1.0",
    description="Make your own DistilBERT: corpus, packed shards, distillation, checkpoint.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=[
        "configs",
        "data_prep",
        "data_prep.shards",
        "data_prep.sources",
        "launch",
        "pretrain",
        "pretrain.objectives",
    ],
    package_data={"configs": ["*.yaml"]},
    entry_points={"console_scripts": ["distil=launch.cli:main"]},
    install_requires=[
        "accelerate>=1.10,<2",
        "charset-normalizer>=3,<4",
        "datasets>=4.0,<6",
        "huggingface_hub>=1.0,<3",
        "mwparserfromhell>=0.6.5,<0.8",
        "numpy>=1.26,<3",
        "pyarrow>=18",
        "pydantic>=2.8,<3",
        "PyYAML>=6,<7",
        "rich>=13,<16",
        "safetensors>=0.5,<1",
        "tokenizers>=0.22,<0.24",
        "torch>=2.6,<3",
        "transformers>=5.10,<6",
        "typer>=0.12,<1",
        "zstandard>=0.22,<1",
    ],
    extras_require={
        "tensorboard": ["tensorboard>=2.15"],
        "deepspeed": ["deepspeed>=0.16"],
        "dev": [
            "mypy>=1.15",
            "pre-commit>=4",
            "pytest>=8",
            "ruff>=0.9",
            "setuptools>=68",
            "tensorboard>=2.15",
            "types-PyYAML",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
