"""Small transformers with freshly drawn weights, from TransformerLens's own parts."""

from typing import Any, Literal

NORMALIZATION_TYPES = {"none": None, "pre": "LN"}


def build_native(
    *,
    n_layers: int,
    d_model: int,
    n_heads: int,
    d_mlp: int,
    d_vocab: int,
    n_ctx: int,
    seed: int,
    normalization: Literal["none", "pre"],
) -> Any:
    """A native `TransformerBridge` with ReLU, on the CPU.

    Arguments:
        n_layers: blocks.
        d_model: width of the residual stream.
        n_heads: attention heads in a block.
        d_mlp: width of the feed-forward part.
        d_vocab: tokens.
        n_ctx: positions.
        seed: draws the weights.
        normalization: blocks without normalisation, or with LayerNorm before each part and the readout.
    """
    # Importing TransformerLens takes seconds, which `ace-lens --help` should not.
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge  # boot_native is put on the class at run time
    return bridge.boot_native(
        TransformerBridgeConfig(
            n_layers=n_layers,
            d_model=d_model,
            n_heads=n_heads,
            d_head=d_model // n_heads,
            d_mlp=d_mlp,
            d_vocab=d_vocab,
            n_ctx=n_ctx,
            act_fn="relu",
            normalization_type=NORMALIZATION_TYPES[normalization],
            seed=seed,
            device="cpu",
        )
    )
