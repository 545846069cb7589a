"""Small models of every kind that the library supports, built offline and without randomness of their own."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
import real_models
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

settings.register_profile(
    "ace",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("ace")
# More threads than one make models this small slower, and much slower on a busy machine.
torch.set_num_threads(1)

HAS_HOOKED_TRANSFORMER = version("transformer-lens").startswith("3.")
WORDS = [
    "the",
    "The",
    "key",
    "keys",
    "to",
    "cabinet",
    "cabinets",
    "near",
    "a",
    "is",
    "are",
    "was",
    "were",
    "man",
    "men",
    "sees",
    "old",
]
N_LAYERS = 3
D_MODEL = 32
KINDS = ["gpt2", "llama", "native"] + (["hooked"] if HAS_HOOKED_TRANSFORMER else [])
WITH_TOKENIZER = [kind for kind in KINDS if kind != "native"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One token a word, with and without a space before it; other text is <unk>."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<unk>": 2}
    for word in WORDS:
        vocabulary[word] = len(vocabulary)
        vocabulary[" " + word] = len(vocabulary)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+"), "isolated")
    words.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("tokenizer")
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def sharpened(model):
    """Freshly drawn weights barely attend; larger ones make every path through the model count."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def build(kind, tokenizer, dtype=torch.float32):
    """A three-layer model of the given kind, with the same weights every time."""
    vocabulary = len(tokenizer)
    torch.manual_seed(0)
    if kind == "native":
        cfg = TransformerBridgeConfig(
            n_layers=N_LAYERS,
            d_model=D_MODEL,
            n_heads=4,
            d_head=8,
            d_mlp=64,
            d_vocab=vocabulary,
            n_ctx=32,
            act_fn="gelu",
            normalization_type="LN",
            seed=0,
            device="cpu",
        )
        model = TransformerBridge.boot_native(cfg)
    elif kind == "hooked":
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        cfg = HookedTransformerConfig(
            n_layers=N_LAYERS,
            d_model=D_MODEL,
            n_heads=4,
            d_head=8,
            d_mlp=64,
            d_vocab=vocabulary,
            n_ctx=32,
            act_fn="gelu",
            normalization_type="LN",
            seed=0,
        )
        model = HookedTransformer(cfg, tokenizer=tokenizer)
    elif kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=32,
            n_embd=D_MODEL,
            n_layer=N_LAYERS,
            n_head=4,
            bos_token_id=1,
            eos_token_id=0,
        )
        model = TransformerBridge.boot_transformers(
            "gpt2", hf_model=GPT2LMHeadModel(config), tokenizer=tokenizer, device="cpu"
        )
    else:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=D_MODEL,
            intermediate_size=64,
            num_hidden_layers=N_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=0,
        )
        config.architectures = ["LlamaForCausalLM"]
        model = TransformerBridge.boot_transformers(
            "llama", hf_model=LlamaForCausalLM(config), tokenizer=tokenizer, device="cpu"
        )
    return sharpened(model).to(dtype).eval()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind, tokenizer):
    return build(kind, tokenizer)


@pytest.fixture
def native(tokenizer):
    return build("native", tokenizer)


@pytest.fixture
def gpt2(tokenizer):
    return build("gpt2", tokenizer)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, read once a session: it takes about a minute."""
    import ace_lens as ace

    return ace.load_model(real_models.smollm2_path(), device="cpu")


@pytest.fixture(scope="session")
def gemma3():
    """Gemma-3-270M, read once a session: it takes about two minutes."""
    import ace_lens as ace

    return ace.load_model(real_models.gemma3_path(Path(tempfile.gettempdir()) / "ace-lens-tests"), device="cpu")


@pytest.fixture
def tokens():
    """Sequences of real tokens, `[6, 7]`."""
    return torch.randint(3, 30, (6, 7), generator=torch.Generator().manual_seed(1))


def random_core(rank=2, hook_point="blocks.1.hook_resid_post", d_model=D_MODEL, seed=0, dtype=torch.float64):
    """A core of a random subspace with a random mean."""
    import ace_lens as ace

    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(d_model, rank, generator=generator, dtype=torch.float64))
    mean = torch.randn(d_model, generator=generator, dtype=torch.float64)
    values = torch.arange(rank, 0, -1, dtype=torch.float64)
    return ace.Core(basis.to(dtype), mean.to(dtype), values, hook_point)


def padded(tokens):
    """The first few tokens of each row, padded with 0 on the right and on the left, `[6, 7]` each."""
    right, left = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, length in enumerate([3, 7, 5, 4, 6, 7]):
        right[row, :length] = tokens[row, :length]
        left[row, 7 - length :] = tokens[row, :length]
    return right, left
