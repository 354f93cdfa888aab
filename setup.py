"""The package's metadata; the settings of its tools are in pyproject.toml."""

import re
from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
URL = "https://github.com/keras-dp/keras_dp"
FIGURES = ["matplotlib>=3.9"]
EXAMPLES = [*FIGURES, "mlxtend>=0.23"]
PYTHONS = ("3.11", "3.12", "3.13")

# Where the description is read, there are no files beside it.
README = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({URL}/blob/main/\1)", (HERE / "README.md").read_text(encoding="utf-8"))

setup(
    name="keras_dp",
    version=run_path(str(HERE / "keras_dp" / "version.py"))["__version__"],
    description="Data-parallel training for Keras 3 on TensorFlow, with one device's result",
    long_description=README,
    long_description_content_type="text/markdown",
    author="The keras_dp developers",
    url=URL,
    project_urls={
        "Documentation": f"{URL}/tree/main/docs",
        "Changelog": f"{URL}/blob/main/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    },
    keywords="keras, tensorflow, data parallelism, distributed training, multi-GPU, batch normalization",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {version}" for version in PYTHONS),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["keras_dp", "keras_dp.*"]),
    package_data={"keras_dp": ["py.typed"]},
    install_requires=["keras>=3.15,<3.16", "tensorflow>=2.21,<2.22", "numpy>=1.26", "grpcio>=1.60"],
    entry_points={"console_scripts": ["keras-dp = keras_dp.cli:main"]},
    extras_require={
        "cuda": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "bench": FIGURES,
        "ecosystem": [
            *("comet_ml>=3.49", "keras-hub>=0.32", "keras-tuner>=1.4.8", "mlflow>=3.6", "scikeras>=0.13", "scikit-learn>=1.5"),
            "tf_keras>=2.21,<2.22",
        ],
        "examples": EXAMPLES,
        "ray": [*EXAMPLES, "ray[train]>=2.51,<3"],
        "dev": [
            *EXAMPLES,
            "build>=1.2",
            "hypothesis>=6.100",
            "mypy>=1.15",
            "pandas>=2.2",
            "pre-commit>=4",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.11",
            "scipy>=1.13",
            "tensorboard>=2.20",
        ],
    },
)
