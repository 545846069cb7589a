"""Small models with random weights stand in for those of a hub: the architectures are the real ones."""

import dataclasses
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from conftest import sharpened
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from tokenizers import pre_tokenizers
from transformer_lens.model_bridge import TransformerBridge

import ace_lens as ace
from ace_lens import loading
from ace_lens.experiments.language_models import LANGUAGE_MODELS, language_model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ROPE_OF_LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ARCHITECTURES = {
    "gpt2": lambda vocabulary: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=0
        )
    ),
    "llama-3.1": lambda vocabulary: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=vocabulary, rope_parameters=ROPE_OF_LLAMA_3_1, **SIZES)
    ),
    # A window shorter than the test's sequences, and caps that its logits and attention scores come near.
    "gemma-2": lambda vocabulary: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=vocabulary,
            head_dim=8,
            sliding_window=4,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            **SIZES,
        )
    ),
    "qwen2.5": lambda vocabulary: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=vocabulary, **SIZES)
    ),
}


def architecture_of(name):
    return next(architecture for architecture in ARCHITECTURES if name.startswith(architecture))


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """A saved model of each architecture."""
    folders = {}
    for name, build in ARCHITECTURES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        sharpened(build(len(tokenizer))).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(params=list(ARCHITECTURES))
def folder(folders, request):
    return folders[request.param]


def logits_of_transformers(folder, tokens, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_computes_what_transformers_computes(folder, dtype, tokens):
    model = ace.load_model(folder, dtype=dtype, device="cpu")
    expected = logits_of_transformers(folder, tokens, dtype)
    assert model.cfg.dtype == expected.dtype == dtype
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    assert not any(module.training for module in model.original_model.modules())
    with torch.no_grad():
        logits = model(tokens)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_core_is_found_and_flipped(folder, dtype, tokens):
    model = ace.load_model(str(folder), dtype=dtype, device="cpu")
    samples = ace.Samples.from_tokens(tokens, "all")
    number = ace.LogitMargin(model, positive=[3], negative=[5])
    core = ace.extract_core(model, samples, number, "blocks.2.hook_resid_post", rank=1)
    flip = ace.SignFlipSteerer(core).fwd_hooks()
    with torch.no_grad():
        before = number(samples.at(model(tokens)))
        after = number(samples.at(model.run_with_hooks(tokens, fwd_hooks=flip)))
    # Of a margin that came from random weights, one dimension carries the greater part.
    assert torch.corrcoef(torch.cat([before, after], 1).T.float())[0, 1] < -0.4


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_named_model_loads_with_its_settings(name, folders, tokens):
    settings = language_model(name)
    folder = folders[architecture_of(name)]
    model = dataclasses.replace(settings, spec=str(folder)).load()
    assert {parameter.dtype for parameter in model.parameters()} == {settings.dtype}
    batch = tokens.repeat(settings.batch_size, 1)[: settings.batch_size]
    logits = model(batch)
    assert logits.shape[:2] == batch.shape
    assert logits.isfinite().all()


def test_named_models_are_those_of_the_hub():
    assert {name: settings.spec for name, settings in LANGUAGE_MODELS.items()} == {
        "gpt2-small": "openai-community/gpt2",
        "gpt2-medium": "openai-community/gpt2-medium",
        "gpt2-large": "openai-community/gpt2-large",
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
        "gemma-2-9b": "google/gemma-2-9b",
        "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    }


def test_an_unknown_name_shows_the_nearest():
    with pytest.raises(ValueError, match=r"no settings for 'google/gemma-2-9B-it'\. Nearest names: gemma-2-9b"):
        language_model("google/gemma-2-9B-it")
    with pytest.raises(ValueError, match=r"Nearest names: gpt2-small, .*, qwen2\.5-32b\. Any other .* ace\.load_model"):
        language_model("xyz")


def test_on_the_cpu_numbers_are_float32_by_default(folders, tmp_path, tokenizer):
    saved = transformers.AutoModelForCausalLM.from_pretrained(folders["llama-3.1"], dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert ace.load_model(tmp_path, device="cpu").cfg.dtype == torch.float32


def test_elsewhere_numbers_are_the_checkpoint_s_own_by_default(folders, tmp_path, tokenizer, monkeypatch):
    """No accelerator is needed to see what would be loaded there."""
    saved = transformers.AutoModelForCausalLM.from_pretrained(folders["llama-3.1"], dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "free_memory", lambda place: 0)
    with pytest.raises(ace.LoadingError, match=r"too large for cuda: .* parameters in torch\.bfloat16"):
        ace.load_model(tmp_path, device="cuda")


def test_one_device_or_a_map(folders):
    with pytest.raises(ValueError, match="device_map spreads it over several: give one of them"):
        ace.load_model(folders["gpt2"], device="cpu", device_map="auto")
    model = ace.load_model(folders["gpt2"], device_map={"": "cpu"})
    assert str(model.cfg.device) == "cpu"


def test_memory_is_checked_before_weights_are_read(folders, monkeypatch):
    folder = folders["gpt2"]
    n = sum(tensor.numel() for tensor in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters())
    monkeypatch.setattr(loading, "free_memory", lambda place: {"cpu": 1.2 * 4 * n}[place])
    ace.load_model(folder, device="cpu")

    def read(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "from_pretrained", read)
    monkeypatch.setattr(loading, "free_memory", lambda place: 1.1 * 4 * n)
    with pytest.raises(ace.LoadingError, match=r"too large for cpu: .* in torch\.float32 .* \(dtype=torch\.bfloat16\)"):
        ace.load_model(folder, device="cpu")


def test_a_quantised_checkpoint_is_not_estimated(folders, tmp_path, monkeypatch):
    config = transformers.AutoConfig.from_pretrained(folders["gpt2"])
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)

    def reach(*args, **kwargs):
        raise RuntimeError("reached")

    monkeypatch.setattr(TransformerBridge, "boot_transformers", reach)
    monkeypatch.setattr(loading, "free_memory", lambda place: 0)
    with pytest.raises(RuntimeError, match="reached"):
        ace.load_model(tmp_path, device="cpu")


def test_too_large_shows_both_numbers(monkeypatch):
    monkeypatch.setattr(loading, "free_memory", lambda place: 12e9)
    with pytest.raises(ace.LoadingError) as caught:
        loading._require_memory("some/model", 32_763_876_352, torch.bfloat16, ["cuda:0", "cuda:1"])
    assert str(caught.value) == (
        "some/model is too large for cuda:0 and cuda:1: 32.8 billion parameters in torch.bfloat16 take 65.5 GB, with "
        "room to compute 78.6 GB, and 24.0 GB are free. You can take a smaller model, free memory that others hold, "
        'or spread it over several GPUs (device_map="auto").'
    )


def test_free_memory_is_that_of_the_machine(monkeypatch):
    assert 1e6 < loading.free_memory("cpu") < 1e14
    assert loading.free_memory("disk") == float("inf")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2)
    assert loading.free_memory("cuda:1") == 10


def test_a_map_names_its_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loading._places(None, "auto") == ["cuda:0", "cuda:1"]
    assert loading._places(None, {"model": 1, "lm_head": "cpu", "rest": 1}) == ["cpu", "cuda:1"]
    assert loading._places(None, "cuda:1") == loading._places("cuda:1", None) == ["cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert loading._places(None, "auto") == ["cpu"]


@pytest.mark.parametrize("spec", ["./models/gpt2", "/nowhere", "models/gpt2.gguf", "~/models/gpt2", "a/b/c"])
def test_a_path_to_nothing_is_not_asked_of_the_hub(spec):
    with pytest.raises(
        ace.LoadingError, match=r"There is no file or folder .*(gpt2|nowhere|gguf|a/b/c) \(looked from /"
    ):
        ace.load_model(spec)


def test_what_lies_there_has_to_be_a_model(tmp_path):
    with pytest.raises(ace.LoadingError, match=r"has no config\.json.*for a GGUF model, give the file itself"):
        ace.load_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(ace.LoadingError, match="is a file, but not a GGUF"):
        ace.load_model(weights)


RESPONSE = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (
            GatedRepoError("403", response=RESPONSE),
            r"owner/model is gated: .* Accept them at https://huggingface\.co/owner/model, then log in .*hf auth login",
        ),
        (
            RepositoryNotFoundError("404", response=RESPONSE),
            r"There is no model owner/model on the Hugging Face hub, or it is private; nor .* folder",
        ),
        (
            LocalEntryNotFoundError("not cached"),
            r"owner/model is not .* on this machine, and the Hugging Face hub cannot be reached\. Check the network",
        ),
        (ConnectionError("refused"), "the Hugging Face hub cannot be reached"),
    ],
)
def test_what_the_hub_answers_is_said_plainly(cause, message, monkeypatch):
    """Transformers wraps the hub's errors in its own."""

    def refuse(*args, **kwargs):
        raise OSError("a long story") from cause

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ace.LoadingError, match=message) as caught:
        ace.load_model("owner/model")
    assert caught.value.__cause__.__cause__ is cause


def test_other_errors_stay_as_they_are(monkeypatch):
    def refuse(*args, **kwargs):
        raise HfHubHTTPError("500 the hub is ill", response=RESPONSE)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(HfHubHTTPError, match="the hub is ill"):
        ace.load_model("owner/model")


def test_offline_nothing_is_downloaded():
    """The tests run with HF_HUB_OFFLINE set, so this is the real thing."""
    with pytest.raises(ace.LoadingError, match=r"nobody/nothing is not .* HF_HUB_OFFLINE keeps it .* Unset"):
        ace.load_model("nobody/nothing")


def test_offline_half_a_model_is_not_enough(folders, monkeypatch):
    """The configuration was downloaded, the weights were not."""
    config = transformers.AutoConfig.from_pretrained(folders["gpt2"])
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **kwargs: config)
    with pytest.raises(ace.LoadingError, match=r"nobody/nothing is not \(all\) on this machine"):
        ace.load_model("nobody/nothing", device="cpu")


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.OwnConfig"}}'
    )
    (tmp_path / "own.py").write_text("raise AssertionError('the code was run')")
    with pytest.raises(ace.LoadingError, match=r"Python code of its own, .* with trust_remote_code=True"):
        ace.load_model(tmp_path)
    with pytest.raises(AssertionError, match="the code was run"):
        ace.load_model(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("BertForMaskedLM", transformers.BertConfig(architectures=["BertForMaskedLM"])),
        ("T5ForConditionalGeneration", transformers.T5Config(architectures=["T5ForConditionalGeneration"])),
    ],
)
def test_encoders_are_refused_before_their_weights_are_read(architecture, config, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="is not a causal language model"):
        ace.load_model(tmp_path)


def write_gguf(path, model, without=()):
    """The weights of a small Qwen2 model as llama.cpp writes them, in full precision, with a tokenizer of bytes."""
    gguf = pytest.importorskip("gguf", reason="the package gguf, which reads GGUF files, is not installed")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(words) - 1) + [3])
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(len(words) - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name not in without:
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def qwen2():
    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=259, tie_word_embeddings=False, **SIZES)
    return sharpened(transformers.Qwen2ForCausalLM(config)).eval()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gguf_file(dtype, qwen2, tmp_path, tokens):
    model = ace.load_model(write_gguf(tmp_path / "tiny-qwen.gguf", qwen2), device="cpu", dtype=dtype)
    dtype = dtype or torch.float32
    assert model.cfg.model_name == "tiny-qwen"
    assert model.cfg.dtype == dtype
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training
    assert not any(module.training for module in model.original_model.modules())
    text = "the other"
    assert model.to_string(model.to_tokens(text, prepend_bos=False)[0]) == text
    assert model.to_tokens(text, prepend_bos=False).shape[1] == 5
    with torch.no_grad():
        logits, expected = model(tokens), qwen2.to(dtype)(tokens).logits
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


def test_a_gguf_file_without_some_weights_is_refused(qwen2, tmp_path):
    lost = "model.layers.2.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "part.gguf", qwen2, without=[lost])
    with pytest.raises(
        ace.LoadingError, match=rf"lacks 1 of the model's weights, the first {lost}.*gguf-split --merge"
    ):
        ace.load_model(path)


def test_a_gguf_file_is_dequantised_on_the_cpu(qwen2, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny-qwen.gguf", qwen2)
    monkeypatch.setattr(loading, "free_memory", lambda place: 0 if place == "cpu" else float("inf"))
    with pytest.raises(ace.LoadingError, match="too large for cpu"):
        ace.load_model(path, device="cuda")


def test_reading_gguf_takes_a_package(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ace.LoadingError, match="takes the package gguf, which is not installed: pip install gguf"):
        ace.load_model(tmp_path / "model.gguf")


def next_word(model, prompt):
    samples = ace.Samples.from_prompts(model, [prompt])
    with torch.no_grad():
        return samples.prepend_bos, model.to_string(samples.at(model(samples.tokens)).argmax(-1))


def test_smollm2(smollm2):
    assert smollm2.cfg.model_name == "SmolLM2-135M-Instruct.Q4_1"
    assert next_word(smollm2, "The capital of France is") == (False, " Paris")


def test_gemma3(gemma3):
    """An architecture that the file does not name as TransformerLens does, and a tokenizer that puts a begin token."""
    assert gemma3.cfg.model_name == "gemma-3-270m-q4_k_m"
    assert next_word(gemma3, "The keys to the cabinet") == (True, " are")
