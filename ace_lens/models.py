"""What the library needs of a model, and the one way in which it runs one.

A model is anything that carries TransformerLens hook points: a `HookedTransformer` (transformer-lens 3.9), a
`TransformerBridge` (3.9 and 4.x; native or around a Hugging Face model), or a module of one's own built on
`HookedRootModule`. Models are typed by what is called on them, because no class is common to these releases.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

HookFunction: TypeAlias = Callable[..., Tensor | None]
FwdHooks: TypeAlias = Sequence[tuple[str, HookFunction]]


@runtime_checkable
class HookedModel(Protocol):
    """A callable from tokens to logits that exposes its activations as TransformerLens hook points."""

    @property
    def hook_dict(self) -> Mapping[str, Any]:
        """Hook points by name; aliases may be listed beside canonical names."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits `[batch, pos, d_vocab]` for tokens `[batch, pos]`."""
        ...


# TransformerBridge names its hook points after its modules; each of these holds the same tensor as the
# TransformerLens name on the right, which every kind of model accepts.
_BRIDGE_NAMES = {
    r"embed\.hook_out": "hook_embed",
    r"pos_embed\.hook_out": "hook_pos_embed",
    r"blocks\.(\d+)\.hook_in": r"blocks.\1.hook_resid_pre",
    r"blocks\.(\d+)\.hook_out": r"blocks.\1.hook_resid_post",
}


def canonical_hook_point(name: str) -> str:
    """The TransformerLens name of a residual hook point, whichever alias it was given by.

    A bridge calls `blocks.0.hook_resid_post` by the name of its module, `blocks.0.hook_out`. Cores store the
    TransformerLens name, so that a core can be carried between kinds of models.
    """
    for bridge_name, lens_name in _BRIDGE_NAMES.items():
        if match := re.fullmatch(bridge_name, name):
            return match.expand(lens_name)
    return name


def resolve_hook_point(model: HookedModel, name: str) -> str:
    """The canonical name of a hook point of `model`.

    Raises:
        ValueError: the model has no such hook point; the message shows the nearest names.
    """
    canonical = canonical_hook_point(name)
    if canonical in model.hook_dict:
        return canonical
    if name in model.hook_dict:
        return name
    names = list(model.hook_dict)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near = near or [known for known in names if "resid" in known][:3]
    raise ValueError(
        f"{type(model).__name__} has no hook point {name!r}. Nearest names: {', '.join(near) or 'none'}. "
        "`model.hook_dict` lists them all."
    )


def require_residual(hook_point: str) -> None:
    """Refuse hook points beside the residual stream.

    Raises:
        ValueError: the hook point is not one of the residual stream.
    """
    if not re.fullmatch(r"hook_embed|blocks\.\d+\.hook_resid_(pre|post)", hook_point):
        raise ValueError(
            f"{hook_point} is not a hook point of the residual stream. A core lives at hook_embed, "
            "blocks.N.hook_resid_pre or blocks.N.hook_resid_post. (On a bridge, hook_resid_mid is only the input of "
            "the second norm: an edit there does not reach the skip path.)"
        )


def n_blocks(model: HookedModel) -> int:
    """How many blocks the model's hook points speak of."""
    layers = [int(match[1]) for name in model.hook_dict if (match := re.match(r"blocks\.(\d+)\.", name))]
    return 1 + max(layers, default=-1)


def is_pointwise_downstream(model: HookedModel, hook_point: str) -> bool:
    """Whether nothing after `hook_point` mixes positions, so that each position has logits of its own.

    True for the residual stream after the last block. Elsewhere an attention layer follows (or, for a name
    that is not known here, has to be assumed), and a position also acts on the logits of later positions.
    """
    return canonical_hook_point(hook_point) == f"blocks.{n_blocks(model) - 1}.hook_resid_post"


def require_differentiable(model: HookedModel) -> None:
    """Refuse models in which a position's own derivative, or an edit of the residual, has no meaning.

    Raises:
        TypeError: the model runs elsewhere, or is not a causal language model.
    """
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{name} runs its model in another process: it cannot be differentiated, and it discards what "
            "hooks return. Load the model here, with TransformerBridge.boot_transformers(...)."
        )
    config = getattr(getattr(model, "original_model", None), "config", None)
    can_generate = getattr(getattr(model, "original_model", None), "can_generate", lambda: True)
    bidirectional = getattr(getattr(model, "cfg", None), "attention_dir", "causal") == "bidirectional"
    if bidirectional or getattr(config, "is_encoder_decoder", False) or not can_generate():
        raise TypeError(
            f"{getattr(model.cfg, 'model_name', name)!r} is an encoder: its logits do not predict the next "
            "token from the positions before it, which extraction relies on. Use a causal language model."
        )


def weight_processing(model: HookedModel) -> dict[str, Any]:
    """The processing that a model's weights have had, which leaves what it computes as it is.

    Only one kind changes the residual stream: centring the weights that write to it takes its mean over d_model away.
    `writing_weights_centred` says whether that was done, None where it cannot be told. It is measured on the token
    embedding, because no configuration records it.
    """
    cfg = getattr(model, "cfg", None)
    embedding = getattr(model, "W_E", None)
    centred = None
    if isinstance(embedding, Tensor):
        rows = embedding.detach()[:256].float()  # enough to tell, and cheap for a vocabulary of any size
        centred = bool(rows.mean(-1).abs().max() < 1e-3 * rows.abs().max())
    return {
        "normalization_type": getattr(cfg, "normalization_type", None),
        "compatibility_mode": bool(getattr(model, "compatibility_mode", False)),
        "writing_weights_centred": centred,
    }


@contextmanager
def attached(model: HookedModel, fwd_hooks: FwdHooks) -> Iterator[None]:
    """Attach hook functions for the length of a block; on the way out take away these and no others.

    The hooks go straight to their hook points, after those that are already there: the user's own hooks stay,
    whatever is raised inside.

    Raises:
        ValueError: the model has no such hook point.
        RuntimeError: the block ended well, but a hook never fired.
    """
    names = [resolve_hook_point(model, name) for name, _ in fwd_hooks]
    silent = dict(enumerate(names))

    def watched(index: int, function: HookFunction) -> HookFunction:
        def fire(activation: Tensor, hook: Any) -> Tensor | None:
            silent.pop(index, None)
            return function(activation, hook=hook)

        return fire

    handles = []
    try:
        for index, (name, (_, function)) in enumerate(zip(names, fwd_hooks, strict=True)):
            point = model.hook_dict[name]
            point.add_hook(watched(index, function))
            handles.append((point, point.fwd_hooks[-1]))
        yield
    finally:
        for point, handle in reversed(handles):
            handle.hook.remove()
            point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]
    if silent:
        raise RuntimeError(
            f"No activation passed {', '.join(sorted(set(silent.values())))}, so the hook there did nothing. "
            "Likely causes: no forward pass was run, or this model never evaluates that hook point."
        )


def _with_descendants(roots: Iterable[Any]) -> Iterator[torch.nn.Module]:
    """Each module once; `Module.modules` is many times slower, which counts where this is done for every edit."""
    waiting = [root for root in roots if isinstance(root, torch.nn.Module)]
    seen = set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(module.children())
            yield module


@contextmanager
def evaluating(model: HookedModel) -> Iterator[None]:
    """Evaluation mode (no dropout) for the length of a block; every module's own mode is put back."""
    # A bridge keeps the Hugging Face model, and with it some dropout, outside its own tree of modules.
    roots = (model, getattr(model, "original_model", None))
    training = [module for module in _with_descendants(roots) if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def run(model: HookedModel, tokens: Tensor, attention_mask: Tensor, fwd_hooks: FwdHooks = (), **options: Any) -> Any:
    """One forward pass with the given hooks, in evaluation mode: logits `[batch, pos, d_vocab]`.

    Arguments:
        model: the model.
        tokens: `[batch, pos]`.
        attention_mask: `[batch, pos]`, 1 at real tokens; longer where keys and values of earlier ones are cached.
        fwd_hooks: hook functions by hook point.
        options: what else the model takes, of which some change what it returns.
    """
    # A mask of ones says nothing; modules of one's own need not take it.
    masks = {} if bool(attention_mask.all()) else {"attention_mask": attention_mask}
    with attached(model, fwd_hooks), evaluating(model):
        return model(tokens, **masks, **options)


def unembed(model: HookedModel, residual: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
    """From the residual stream after the last block, `[batch, pos, d_model]`, to logits: final norm, unembedding, cap.

    None of them depends on the training mode. With `tokens`, only their logits are computed and all others are NaN,
    which spares most of the work over a large vocabulary. Hooks of the unembedding do not fire then.
    """
    parts: Any = model
    if parts.cfg.normalization_type is not None:
        residual = parts.ln_final(residual)
    cap = getattr(parts.cfg, "output_logits_soft_cap", None) or 0.0

    def capped(logits: Tensor) -> Tensor:
        return cap * torch.tanh(logits / cap) if cap > 0 else logits

    if tokens is None:
        return capped(parts.unembed(residual))
    weight, bias = parts.unembed.W_U, parts.unembed.b_U
    few = residual @ weight[:, tokens] + bias[tokens]
    logits = few.new_full((*few.shape[:-1], weight.shape[1]), torch.nan)
    logits[..., tokens] = capped(few)
    return logits
