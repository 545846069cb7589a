import json

import pytest
import torch
from conftest import random_core
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ace_lens as ace


@given(
    rank=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    name=st.text(max_size=20),
    prepend_bos=st.sampled_from([None, True, False]),
)
def test_saved_and_loaded_it_is_the_same(tmp_path_factory, rank, seed, dtype, name, prepend_bos):
    plain = random_core(rank, seed=seed, dtype=dtype)
    provenance = ace.Provenance(
        model_name=name, processing={"compatibility_mode": True}, n_samples=7, prepend_bos=prepend_bos
    )
    core = ace.Core(plain.basis, plain.mean, plain.singular_values, plain.hook_point, provenance)
    path = tmp_path_factory.mktemp("core") / "core.safetensors"
    core.save(path)
    loaded = ace.Core.load(path)
    for part in ("basis", "mean", "singular_values"):
        assert torch.equal(getattr(loaded, part), getattr(core, part))
    assert loaded.hook_point == core.hook_point
    assert loaded.provenance == provenance


def test_a_foreign_or_damaged_file_is_refused(tmp_path):
    missing = tmp_path / "missing.safetensors"
    with pytest.raises(FileNotFoundError, match="There is no core at"):
        ace.Core.load(missing)
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        ace.Core.load(garbage)
    pickled = tmp_path / "core.pt"
    torch.save({"basis": torch.eye(2)}, pickled)
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        ace.Core.load(pickled)
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(2)}, foreign)
    with pytest.raises(ValueError, match="not a core of this format"):
        ace.Core.load(foreign)
    good = tmp_path / "good.safetensors"
    random_core().save(good)
    data = good.read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(data[:-10])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        ace.Core.load(cut)
    tensors = load_file(good)
    metadata = {"format": "ace_lens.core/1", "core": json.dumps({"hook_point": "x", "provenance": {}})}
    missing_part = tmp_path / "part.safetensors"
    save_file({"basis": tensors["basis"]}, missing_part, metadata)
    with pytest.raises(ValueError, match="claims to be a core, but is damaged"):
        ace.Core.load(missing_part)
    skewed = tmp_path / "skewed.safetensors"
    save_file({**tensors, "basis": tensors["basis"] + 1}, skewed, metadata)
    with pytest.raises(ValueError, match="damaged: A core's basis must have orthonormal columns"):
        ace.Core.load(skewed)
    short = tmp_path / "short.safetensors"
    save_file({**tensors, "mean": tensors["mean"][:3]}, short, metadata)
    with pytest.raises(ValueError, match="claims to be a core, but is damaged"):
        ace.Core.load(short)


def test_slices_are_the_cores_of_lower_rank():
    core = random_core(4)
    assert core[:2].rank == 2
    assert torch.equal(core[:2].basis, core.basis[:, :2])
    assert torch.equal(core[:].basis, core.basis)
    with pytest.raises(ValueError, match="ranks 1 to 4; there is no rank 5"):
        core[:5]
    for wrong in (slice(1, 3), slice(0, 4, 2), 2):
        with pytest.raises(TypeError, match="take core\\[:r\\]"):
            core[wrong]


def test_coordinates_and_energy():
    core = random_core(3)
    inside = torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(core.coordinates(core.mean + inside @ core.basis.T), inside)
    assert core.coordinates(torch.zeros(7, 32)).dtype == torch.float64
    torch.testing.assert_close(core.energy, torch.tensor([9, 13, 14], dtype=torch.float64) / 14)


def test_to_changes_dtype_and_stays_a_core():
    core = random_core(3).to(torch.float32)
    assert core.basis.dtype == core.mean.dtype == torch.float32


def test_a_core_is_frozen_and_sound():
    core = random_core(2)
    with pytest.raises(AttributeError):
        core.hook_point = "elsewhere"
    with pytest.raises(ValueError, match="orthonormal columns"):
        ace.Core(2 * core.basis, core.mean, core.singular_values, core.hook_point)
    with pytest.raises(ValueError, match="must be finite"):
        ace.Core(core.basis, core.mean * torch.nan, core.singular_values, core.hook_point)


def test_repr_says_what_it_is():
    assert repr(random_core(2)) == (
        "Core(rank 2 of 32, 100.00% of energy, at blocks.1.hook_resid_post of unknown; target unknown; 0 samples)"
    )


def test_it_only_fits_models_like_its_own(gpt2, tokens):
    samples = ace.Samples.from_tokens(tokens)
    core = ace.extract_core(gpt2, samples, ace.CentredLogits([3, 5]), "blocks.1.hook_resid_post", rank=1)
    core.check_model(gpt2)
    with pytest.raises(ValueError, match="width 16, but this one has width 32"):
        random_core(2, d_model=16).check_model(gpt2)
    with pytest.raises(ValueError, match=r"no hook point 'blocks\.9\.hook_resid_post'"):
        random_core(2, hook_point="blocks.9.hook_resid_post").check_model(gpt2)
    gpt2.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(ValueError, match=r"processed differently \(writing_weights_centred: False there, True here"):
        core.check_model(gpt2)
    with pytest.raises(ValueError, match="processed differently"):
        ace.validate(gpt2, core, samples, ace.CentredLogits([3, 5]), ace.KL)
    with pytest.raises(ValueError, match="processed differently"):
        ace.SignFlipSteerer(core).attach(gpt2)
