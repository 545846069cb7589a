"""A core through training, against models whose cores are known."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import build
from safetensors.torch import save_file
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

import ace_lens as ace
from ace_lens import trajectory
from ace_lens.readout import find_readout

P = 11
HOOK_POINT = "blocks.0.hook_resid_post"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.hook_resid_post = HookPoint()


class Clocks(HookedRootModule):
    """Adds modulo P on clocks of given frequencies and sizes, in a random frame of the residual stream."""

    def __init__(self, frequencies, sizes=None, seed=0, d_model=16, norm="none"):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        frame, _ = torch.linalg.qr(torch.randn(d_model, 2 * len(frequencies), generator=generator))
        angles = 2 * math.pi * torch.arange(P)[:, None] * torch.tensor(frequencies) / P
        scale = torch.tensor(sizes or [1.0] * len(frequencies)).repeat(2)
        clocks = scale * torch.cat([angles.cos(), angles.sin()], 1)
        self.register_buffer("answers", clocks @ frame.T)
        self.embed = nn.Embedding(P, d_model)
        self.blocks = nn.ModuleList([Block()])
        self.ln_final = {"none": nn.Identity, "layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm](d_model)
        self.unembed = nn.Linear(d_model, P)
        with torch.no_grad():
            # Without its core the model always gives the same answer.
            self.unembed.bias.copy_(0.01 * torch.arange(P))
            self.embed.weight.copy_(clocks @ frame.T)
            self.unembed.weight.copy_(10 * clocks @ frame.T)
        self.cfg = SimpleNamespace(
            model_name="clocks", normalization_type=None if norm == "none" else norm, d_vocab=P, n_ctx=2
        )
        self.setup()

    def forward(self, tokens, attention_mask=None):
        return self.unembed(self.ln_final(self.blocks[0].hook_resid_post(self.answers[tokens.cumsum(1) % P])))


def samples():
    pairs = torch.cartesian_prod(torch.arange(P), torch.arange(P))
    order = torch.randperm(P * P, generator=torch.Generator().manual_seed(0))
    everything = ace.Samples.from_tokens(pairs, "last", labels=pairs.sum(1) % P)
    return everything[order[:60]], everything[order[60:]]


def track(*models, hook_point=HOOK_POINT, parts=None, **options):
    return ace.track_core(enumerate(models), *(parts or samples()), ace.CentredLogits(), hook_point, **options).points


@pytest.mark.parametrize("frequencies", [[3], [1, 4], [2, 3, 5]])
def test_clocks_are_read_as_they_are(frequencies):
    (point,) = track(Clocks(frequencies), period=P, chance=2 / P)
    assert point.train_accuracy == point.test_accuracy == 1
    assert point.rank == 2 * len(frequencies) == len(point.eigenvalues)
    assert point.modes == tuple(frequencies)
    assert point.unit_circle == 1
    assert point.r2 == pytest.approx(1, abs=1e-5)
    assert point.keep == 1
    assert point.remove <= 2 / P
    assert point.keep_curve[-1] == 1
    assert point.remove_curve[-1] <= 2 / P
    assert 1 <= point.r_suf <= point.rank
    assert 1 <= point.r_nec <= point.rank
    assert point.redundancy == point.r_nec - point.r_suf
    power = torch.tensor(point.fourier_power)
    assert power[frequencies].sum() == pytest.approx(1)
    assert power[frequencies].min() > 0.9 / len(frequencies)


def test_a_weak_copy_is_redundant():
    """Both clocks answer alone; the core is lost only when the weak one goes too."""
    (point,) = track(Clocks([1, 4], [1.0, 0.2]), period=P, chance=2 / P)
    assert point.r_suf == 2
    assert point.r_nec == 4
    assert point.rank == 2
    assert point.remove > 0.5


def test_a_model_that_knows_nothing_needs_nothing():
    model = Clocks([1])
    model.answers.copy_(model.answers[torch.randperm(P, generator=torch.Generator().manual_seed(3))].roll(1, 0))
    (point,) = track(model, period=P, chance=0.5)
    assert point.test_accuracy < 0.5
    assert (point.r_suf, point.r_nec, point.redundancy) == (None, None, None)


def found(readout, norms):
    norms.append(readout.norm)
    return readout


@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
def test_of_equal_outputs_the_first_is_the_answer(norm):
    """Classes 3 and 7 are always alike, so that no answer is ever 7."""
    model = Clocks([1, 4], [1.0, 0.4], norm=norm)
    with torch.no_grad():
        model.unembed.weight[7] = model.unembed.weight[3]
        model.unembed.bias[7] = model.unembed.bias[3]
    (point,) = track(model)
    _, held_out = samples()
    most = float((held_out.labels != 7).double().mean())
    assert point.test_accuracy == point.keep_curve[3] == pytest.approx(most)
    assert max(point.keep_curve) <= most + 1e-9
    assert max(point.remove_curve) <= most + 1e-9


@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
def test_the_closed_form_of_the_readout_changes_nothing(monkeypatch, norm):
    torch.manual_seed(0)
    model = Clocks([1, 4], [1.0, 0.4], norm=norm)
    model.answers += 0.2 * torch.randn_like(model.answers)
    norms = []
    monkeypatch.setattr(trajectory, "find_readout", lambda *arguments: found(find_readout(*arguments), norms))
    # Several batches, the last of them short.
    (quick,) = track(model, period=P, batch_size=25)
    assert norms == [norm]
    monkeypatch.setattr(trajectory, "find_readout", lambda *arguments: None)
    (slow,) = track(model, period=P)
    # What lies beyond is rounding.
    n = min(len(quick.keep_curve), len(slow.keep_curve))
    assert n >= 10
    assert quick.keep_curve[:n] == pytest.approx(slow.keep_curve[:n], abs=1e-9)
    assert quick.remove_curve[:n] == pytest.approx(slow.remove_curve[:n], abs=1e-9)
    assert (quick.rank, quick.r_suf, quick.r_nec, quick.keep_interval) == (
        slow.rank,
        slow.r_suf,
        slow.r_nec,
        slow.keep_interval,
    )
    assert quick.r2 == pytest.approx(slow.r2, abs=1e-5)


def test_curves_are_those_of_validate():
    train, held_out = samples()
    torch.manual_seed(0)
    model = Clocks([1, 4], [1.0, 0.4])
    model.answers += 0.2 * torch.randn_like(model.answers)
    (point,) = track(model)
    pairs = torch.cat([train.tokens[train.sequence], held_out.tokens[held_out.sequence]])
    core = ace.extract_core(model, ace.Samples.from_tokens(pairs), ace.CentredLogits(), HOOK_POINT)
    verdict = ace.validate(model, core, held_out, ace.CentredLogits(), ranks=range(1, core.rank + 1))
    assert point.keep_curve == pytest.approx([estimate.value for estimate in verdict.keep])
    assert point.remove_curve == pytest.approx([estimate.value for estimate in verdict.remove])
    assert point.test_accuracy_interval == (verdict.baseline.low, verdict.baseline.high)
    assert point.eigenvalues == ()


def test_layers_in_the_middle_are_run_through(tokenizer):
    """Blocks follow the hook point, so outputs are not linear in the activation."""
    model = build("native", tokenizer)
    tokens = torch.randint(3, 30, (40, 5), generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % 5
    parts = [ace.Samples.from_tokens(tokens[half], labels=labels[half]) for half in (slice(0, 20), slice(20, 40))]
    (point,) = ace.track_core([(0, model)], *parts, ace.CentredLogits(range(5)), "blocks.1.hook_resid_post").points
    assert len(point.keep_curve) == len(point.remove_curve) >= point.rank
    assert point.keep_curve[-1] == pytest.approx(point.test_accuracy, abs=0.1)


def saved(model, path, wrap=lambda state: state):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(wrap(state), path)


def test_a_folder_of_state_dicts_of_any_kind(tmp_path):
    saved(Clocks([1]), tmp_path / "model_2.safetensors")
    saved(Clocks([2]), tmp_path / "step10.pt", lambda state: {"model": state, "step": 10})
    saved(Clocks([3]), tmp_path / "run1-epoch-0005.pth")
    saved(Clocks([4]), tmp_path / "step20.pt", lambda state: {f"model.{name}": x for name, x in state.items()})
    (tmp_path / "notes-1.txt").write_text("not a checkpoint")
    points = ace.track_core(
        ace.models_in(tmp_path, lambda: Clocks([5])), *samples(), ace.CentredLogits(), HOOK_POINT, period=P
    ).points
    assert [(point.epoch, point.modes) for point in points] == [(2, (1,)), (5, (3,)), (10, (2,)), (20, (4,))]


def test_a_folder_that_holds_no_such_thing(tmp_path):
    with pytest.raises(ValueError, match=r"holds no checkpoints: no file \*\.safetensors, \*\.pt or \*\.pth"):
        next(ace.models_in(tmp_path, lambda: Clocks([1])))
    saved(Clocks([1], d_model=8), tmp_path / "step1.pt")
    with pytest.raises(ValueError, match=r"does not fit the model: 0 parameters are missing, \d have another shape"):
        next(ace.models_in(tmp_path, lambda: Clocks([1])))
    saved(Clocks([1]), tmp_path / "step1.pt", lambda state: {"embed.weight": state["embed.weight"]})
    with pytest.raises(ValueError, match=r"2 parameters are missing \(such as unembed\.bias\)"):
        next(ace.models_in(tmp_path, lambda: Clocks([1])))
    saved(Clocks([1]), tmp_path / "final.pt")
    with pytest.raises(ValueError, match="has no number in its name, so its place in the training is unknown"):
        next(ace.models_in(tmp_path, lambda: Clocks([1])))


def test_labels_are_the_numbers_of_outputs():
    train, held_out = samples()
    pairs = held_out.tokens[held_out.sequence]
    sums = pairs.sum(1) % P
    for labels, target, said in (
        (sums + 1, ace.CentredLogits(), rf"has {P}, and labels are .* go from 0 to {P}"),
        (sums - 1, ace.CentredLogits(), "from -1 to"),
        (sums, ace.CentredLogits([0, 1]), f"has 2, and labels .* go from 0 to {P - 1}"),
        (sums, lambda logits: logits[:, :1], r"<lambda> has 1, .* Give a target with one logit for each class"),
    ):
        with pytest.raises(ValueError, match=said):
            ace.track_core([(0, Clocks([1]))], train, ace.Samples.from_tokens(pairs, labels=labels), target, HOOK_POINT)
    halves = [
        ace.Samples.from_tokens(part.tokens[part.sequence], labels=part.tokens[part.sequence].sum(1) % 2 == 1)
        for part in (train, held_out)
    ]
    (point,) = ace.track_core([(0, Clocks([1]))], *halves, ace.CentredLogits([0, 1]), HOOK_POINT).points
    assert 0 < point.test_accuracy < 1


def test_samples_without_labels_are_refused():
    train, held_out = samples()
    bare = ace.Samples.from_tokens(train.tokens)
    with pytest.raises(ValueError, match="compares outputs with labels, but the samples have none"):
        track(Clocks([1]), parts=(bare, held_out))


def test_a_trajectory_prints_and_loads_back_equal(tmp_path):
    found = ace.track_core([(7, Clocks([1])), (8, Clocks([2]))], *samples(), ace.CentredLogits(), HOOK_POINT, period=P)
    found.save(tmp_path / "trajectory.json")
    assert ace.Trajectory.load(tmp_path / "trajectory.json") == found
    header, first, second = str(found).splitlines()
    assert header.split()[:6] == ["epoch", "train", "test", "rank", "r_suf", "r_nec"]
    assert header.split()[6:] == ["keep", "remove", "circle", "modes", "R2"]
    assert first.split()[:4] == ["7", "1.000", "1.000", "2"]
    assert second.split()[-3:] == ["1.00", "1", "1.000"]


def test_rows_of_different_lengths_are_joined():
    train, held_out = samples()
    tokens = torch.cat([torch.zeros(len(train), 1, dtype=torch.long), train.tokens[train.sequence]], 1)
    longer = ace.Samples.from_tokens(tokens, labels=train.labels)
    (point,) = track(Clocks([1]), parts=(longer, held_out), period=P)
    assert point.train_accuracy == point.test_accuracy == 1
