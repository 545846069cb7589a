"""The README's code runs word for word, on small models in place of those from a hub."""

import inspect
import re
from pathlib import Path

import torch
from conftest import build
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

import ace_lens as ace

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_a_session_of_your_own(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = build("gpt2", tokenizer)
    monkeypatch.setattr(TransformerBridge, "boot_transformers", lambda name: small)
    nouns = {"key": False, "keys": True, "man": False, "men": True, "cabinet": False, "cabinets": True}
    held_prompts = [f"The old {noun}" for noun in nouns]
    names = {
        "prompts": [f"The {noun}" for noun in nouns],
        "is_plural": list(nouns.values()),
        "held_out": ace.Samples.from_prompts(small, held_prompts, labels=list(nouns.values())),
        "tokens": torch.tensor([[3, 5, 7]]),
        "my_own_hook": lambda activation, hook: None,
    }
    for block in BLOCKS[:3]:
        # The small model has three blocks.
        exec(re.sub(r"blocks\.\d+\.", "blocks.1.", block), names)
    assert ace.Core.load("number.safetensors").rank == 1
    assert names["z"].shape == (1, 3, 1)
    printed = capsys.readouterr().out
    assert "ROC AUC: baseline" in printed
    assert "The keys to the cabinet" in printed


def indirect_object_prompts():
    """Two names, one of them again, and a full stop: the answer is the name that was not repeated."""
    first, second = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    pairs = torch.stack([first.flatten(), second.flatten()], 1)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    again = torch.cat([pairs[:, 0], pairs[:, 1]])
    answers = torch.cat([pairs[:, 1], pairs[:, 0]])
    stop = torch.full_like(again, 8)
    return torch.cat([pairs.repeat(2, 1), again[:, None], stop[:, None]], 1), answers


def trained_on_indirect_objects():
    cfg = TransformerBridgeConfig(
        n_layers=2,
        d_model=32,
        n_heads=4,
        d_head=8,
        d_mlp=64,
        d_vocab=9,
        n_ctx=4,
        act_fn="gelu",
        normalization_type="LN",
        seed=0,
        device="cpu",
    )
    model = TransformerBridge.boot_native(cfg)
    tokens, answers = indirect_object_prompts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(model(tokens)[:, -1], answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_a_task_of_your_own(tmp_path, monkeypatch, capsys):
    """Indirect-object identification, the smallest of its kind, learnt by a model of two layers."""
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[3]
    assert len(block.strip().splitlines()) <= 12
    names = {
        "ace": ace,
        "torch": torch,
        "model": trained_on_indirect_objects(),
        "my_task": indirect_object_prompts,
    }
    exec(block, names)
    core, proof = names["core"], names["proof"]
    assert proof.verdict.baseline.value > 0.95
    # Eight answers, of which softmax does not see the constant: seven dimensions carry the task.
    assert 4 <= core.rank <= 7
    assert proof.verdict.keep[-1].value > 0.95
    assert proof.verdict.remove[-1].high < 0.85
    assert proof.verdict.flip[-1].value < 0.05
    assert proof.controls.row("random").remove.value > 0.95
    assert ace.Proof.load("proof.json") == proof
    assert Path("curves.png").stat().st_size > 5000
    assert Path("controls.png").stat().st_size > 5000
    assert "sufficient from rank" in str(proof.selection[core.hook_point])
    assert "trained (DAS)" in capsys.readouterr().out


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
