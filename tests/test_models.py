import pytest
import torch
from conftest import random_core

import ace_lens as ace
from ace_lens.models import (
    attached,
    canonical_hook_point,
    is_pointwise_downstream,
    resolve_hook_point,
    weight_processing,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("blocks.10.hook_out", "blocks.10.hook_resid_post"),
        ("blocks.0.hook_in", "blocks.0.hook_resid_pre"),
        ("embed.hook_out", "hook_embed"),
        ("blocks.3.hook_resid_post", "blocks.3.hook_resid_post"),
        ("blocks.3.attn.hook_out", "blocks.3.attn.hook_out"),
    ],
)
def test_canonical_names(given, expected):
    assert canonical_hook_point(given) == expected


def test_canonical_names_hold_the_same_tensor(model, tokens):
    for name in ("hook_embed", "blocks.0.hook_resid_pre", "blocks.2.hook_resid_post"):
        point = model.hook_dict[name]
        assert canonical_hook_point(point.name) == name == resolve_hook_point(model, point.name)


def test_an_unknown_hook_point_shows_the_nearest(model):
    with pytest.raises(ValueError, match=r"no hook point 'blocks\.1\.hook_resid_pst'.*blocks\.1\.hook_resid_post"):
        resolve_hook_point(model, "blocks.1.hook_resid_pst")
    with pytest.raises(ValueError, match=r"no hook point 'xyz'\. Nearest names: blocks\.0\.hook_resid"):
        resolve_hook_point(model, "xyz")


def test_only_after_the_last_block_are_positions_by_themselves(model):
    assert is_pointwise_downstream(model, "blocks.2.hook_resid_post")
    assert is_pointwise_downstream(model, "blocks.2.hook_out")
    assert not is_pointwise_downstream(model, "blocks.2.hook_resid_pre")
    assert not is_pointwise_downstream(model, "hook_embed")


def test_processing_tells_compatibility_mode(gpt2):
    before = weight_processing(gpt2)
    gpt2.enable_compatibility_mode(disable_warnings=True)
    assert weight_processing(gpt2) != before


def test_attached_hooks_see_what_the_user_s_hooks_did_first(native, tokens):
    point = native.hook_dict["blocks.0.hook_resid_post"]
    point.add_hook(lambda activation, hook: activation + 1)
    seen = []
    with attached(native, [("blocks.0.hook_out", lambda activation, hook: seen.append(activation))]):
        native(tokens)
    with native.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda activation, hook: seen.append(activation))]):
        native(tokens)
    assert torch.equal(*seen)
    assert len(point.fwd_hooks) == 1


def test_names_are_checked_before_anything_is_attached(native):
    hooks = [("blocks.0.hook_resid_post", lambda activation, hook: None), ("nowhere", None)]
    with pytest.raises(ValueError, match="no hook point 'nowhere'"), attached(native, hooks):
        pass
    assert not native.hook_dict["blocks.0.hook_resid_post"].fwd_hooks


def test_a_core_travels_between_kinds_of_models(native, gpt2, tokens):
    """Found on one kind, it names its hook point in words that every kind understands."""
    core = ace.extract_core(
        native, ace.Samples.from_tokens(tokens), ace.CentredLogits([3, 5]), "blocks.1.hook_out", rank=1
    )
    gpt2.run_with_hooks(tokens, fwd_hooks=ace.SignFlipSteerer(core).fwd_hooks())
    gpt2.run_with_hooks(tokens, fwd_hooks=ace.SignFlipSteerer(random_core()).fwd_hooks())
