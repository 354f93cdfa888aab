"""The package's metadata; the settings of its tools are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

FIGURES = ["matplotlib>=3.9"]
EXAMPLES = [*FIGURES, "scikit-learn>=1.5"]

setup(
    name="keras_dp",
    version="0.1.0",
    description="Data-parallel training for Keras 3 on TensorFlow, with one device's result",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["keras_dp", "keras_dp.*"]),
    package_data={"keras_dp": ["py.typed"]},
    install_requires=["keras>=3.15,<3.16", "tensorflow>=2.21,<2.22", "numpy>=1.26", "grpcio>=1.60"],
    entry_points={"console_scripts": ["keras-dp = keras_dp.cli:main"]},
    extras_require={
        "cuda": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "bench": FIGURES,
        "examples": EXAMPLES,
        "ray": [*EXAMPLES, "ray[train]>=2.51,<3"],
        "dev": [
            *EXAMPLES,
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
