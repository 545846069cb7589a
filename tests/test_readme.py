"""The README's code runs word for word, on small models in place of those from a hub."""

import inspect
import re
from pathlib import Path

import torch
from conftest import build
from transformer_lens.model_bridge import TransformerBridge

import ace_lens as ace

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_blocks_run_word_for_word(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = build("gpt2", tokenizer)
    monkeypatch.setattr(TransformerBridge, "boot_transformers", lambda name: small)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    # The small model has three blocks.
    blocks = [re.sub(r"blocks\.\d+\.", "blocks.1.", block) for block in blocks]
    nouns = {"key": False, "keys": True, "man": False, "men": True, "cabinet": False, "cabinets": True}
    sides = [nouns, {f"old {noun}": plural for noun, plural in nouns.items()}]
    prompts, held_prompts = ([f"The {noun}" for noun in side] for side in sides)
    names = {
        "prompts": prompts,
        "is_plural": list(nouns.values()),
        "held_out": ace.Samples.from_prompts(small, held_prompts, labels=list(nouns.values())),
        "tokens": torch.tensor([[3, 5, 7]]),
        "my_own_hook": lambda activation, hook: None,
    }
    for block in blocks:
        exec(block, names)
    assert ace.Core.load("number.safetensors").rank == 1
    assert names["z"].shape == (1, 3, 1)
    printed = capsys.readouterr().out
    assert "ROC AUC on 6 samples" in printed
    assert "The keys to the cabinet" in printed


def test_the_table_of_modules_is_complete_and_in_order():
    """A module imports only what stands before it in the README's table."""
    rows = re.findall(r"^\| (`[^|]*?`) \|", README, flags=re.MULTILINE)
    road = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    package = Path(ace.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    assert set(road) == modules | {"experiments"}
    for position, name in enumerate(road):
        path = package / name
        files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            imported = re.findall(r"^\s*from ace_lens\.(\w+)", file.read_text(), flags=re.MULTILINE)
            late = set(imported) - set(road[: position + 1])
            assert not late, f"{file.name} imports {late}, which stand after it"


def test_public_names_are_documented():
    for name in ace.__all__:
        thing = getattr(ace, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, f"{name} has no docstring"
