"""The paper's architecture for modular addition: post-norm encoder layers, with hook points on them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def build_postnorm(
    *, n_layers: int, d_model: int, n_heads: int, d_mlp: int, d_vocab: int, n_ctx: int, dropout: float, seed: int
) -> Any:
    """Torch's own encoder layers (LayerNorm after each part, ReLU, dropout), learned positions, a linear readout.

    Attention is causal. The weights are those that torch draws by default. The model carries TransformerLens hook
    points (`hook_embed`, `hook_pos_embed`, `blocks.{l}.hook_resid_pre` and `hook_resid_post`) as a `HookedRootModule`,
    so that every hook, probe and validation works on it.

    Arguments:
        n_layers: encoder layers.
        d_model: width of the residual stream.
        n_heads: attention heads.
        d_mlp: width of the feed-forward part.
        d_vocab: tokens.
        n_ctx: positions.
        dropout: its probability.
        seed: draws the weights.
    """
    # Importing TransformerLens takes seconds, which `ace-lens --help` should not.
    from transformer_lens.hook_points import HookPoint
    from transformer_lens.HookedRootModule import HookedRootModule

    class Block(nn.Module):
        """An encoder layer between two hook points."""

        def __init__(self) -> None:
            super().__init__()
            self.hook_resid_pre = HookPoint()
            self.layer = nn.TransformerEncoderLayer(d_model, n_heads, d_mlp, dropout, batch_first=True)
            self.hook_resid_post = HookPoint()

        def forward(self, residual: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(residual.shape[1], residual.device, residual.dtype)
            return self.hook_resid_post(self.layer(self.hook_resid_pre(residual), src_mask=mask, is_causal=True))

    class PostNormTransformer(HookedRootModule):
        """Embedding, post-norm encoder layers, linear readout."""

        def __init__(self) -> None:
            super().__init__()
            self.cfg = SimpleNamespace(
                model_name="post-norm",
                n_layers=n_layers,
                d_model=d_model,
                d_vocab=d_vocab,
                n_ctx=n_ctx,
                # None says that nothing stands between the last block and the readout.
                normalization_type=None,
            )
            self.embed = nn.Embedding(d_vocab, d_model)
            self.hook_embed = HookPoint()
            self.pos_embed = nn.Embedding(n_ctx, d_model)
            self.hook_pos_embed = HookPoint()
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.ModuleList(Block() for _ in range(n_layers))
            self.unembed = nn.Linear(d_model, d_vocab)
            self.setup()

        def forward(self, tokens: Tensor) -> Tensor:
            """Logits `[batch, pos, d_vocab]` for tokens `[batch, pos]`."""
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            residual = self.hook_embed(self.embed(tokens)) + self.hook_pos_embed(self.pos_embed(positions))
            residual = self.dropout(residual)
            for block in self.blocks:
                residual = block(residual)
            return self.unembed(residual)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PostNormTransformer()
