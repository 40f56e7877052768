"""Small random models with windows, soft caps, sinks, latent attention, or layers that keep a state beside those of attention."""

import json
import random
from pathlib import Path

_VOCABULARY = 512
_RETRIEVER = "bench/retriever/model"
_SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": _VOCABULARY, "max_position_embeddings": 8192}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_WINDOW = 200


def prompt(start, stop):
    return random.Random(0).choices(range(4, _VOCABULARY - 12), k=stop)[start:]


def saved(folder, kind, change=lambda model: None, config=None, written=None, **options):
    """The folder of a model of random weights, which `change` gets; engines' own classes read what is `written` to its config."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config or f"{kind}Config")(**options))
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    if written:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **written}), encoding="utf-8")
    return str(folder)


def gemma(folder):
    """Weights large enough for the soft cap to matter; every other layer has a window."""
    heads = {**_HEADS, "head_dim": 32, "query_pre_attn_scalar": 2, "intermediate_size": 96}
    scores = {"sliding_window": _WINDOW, "attn_logit_softcapping": 5.0, "initializer_range": 0.2}
    return saved(folder, "Gemma2", **_SHAPE, **heads, **scores)


def gemma4(folder):
    """Every other layer has a window, the others wide heads, whose pages differ."""
    heads = {**_HEADS, "head_dim": 64, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": _WINDOW, "intermediate_size": 96}
    without = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "pad_token_id": 0}
    return saved(folder, "Gemma4", config="Gemma4TextConfig", **_SHAPE, **heads, **kinds, **without, initializer_range=0.1)


def gpt_oss(folder):
    """Sinks take much of the attention; every other layer has a window."""
    heads = {**_HEADS, "head_dim": 64, "intermediate_size": 64, "num_local_experts": 2, "num_experts_per_tok": 2}

    def change(model):
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(5.0, 1.0)

    return saved(folder, "GptOss", change, **_SHAPE, **heads, sliding_window=_WINDOW, initializer_range=0.2)


def laguna(folder):
    """Without experts; windows with sinks, which vLLM reads and transformers does not, in every other layer."""
    import torch

    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_layer_types": ["dense"] * 4, "gating": False}
    heads = {**_HEADS, "head_dim": 64, "intermediate_size": 96, "swa_attention_sink_enabled": True}

    def change(model):
        for number, layer in enumerate(model.model.layers):
            del layer.self_attn.g_proj  # of the gate
            # scores of a good size
            layer.self_attn.q_norm.weight.fill_(2.0)
            layer.self_attn.k_norm.weight.fill_(2.0)
            if number % 2 == 0:
                layer.self_attn.sink = torch.nn.Parameter(torch.randn(_HEADS["num_attention_heads"]) + 5)

    return saved(folder, "Laguna", change, **_SHAPE, **heads, **kinds, sliding_window=_WINDOW, initializer_range=0.2)


def deepseek(folder):
    """Without experts; latent attention in widths of vLLM's CPU kernel."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 64}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    dense = {"first_k_dense_replace": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    return saved(folder, "DeepseekV2", **_SHAPE, **heads, **ranks, **dense, initializer_range=0.1)


# states of 538 kB in float32, of 270 kB in bfloat16: vLLM gives pages of attention as many bytes, 544 tokens (float32 states
# beside bfloat16 keys: 1056)
_MAMBA_HEADS = {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 1, "conv_kernel": 4}


def nemotron_h(folder):
    """Layers of Mamba 2 and of attention, in turns."""
    shape = {name: each for name, each in _SHAPE.items() if name != "num_hidden_layers"}
    kinds = {"layers_block_type": ["mamba", "attention"] * 2, "expand": 16, "chunk_size": 128, **_MAMBA_HEADS}
    sizes = {"head_dim": 64, "intermediate_size": 96, "initializer_range": 0.2}
    # SGLang's names
    written = {"layers_block_type": kinds["layers_block_type"], "mamba_n_groups": 1, "mamba_expand": 16, "mamba_chunk_size": 128}
    return saved(folder, "NemotronH", written=written, **shape, **_HEADS, **kinds, **sizes)


def granite(folder):
    """Layers of Mamba 2 and of attention in turns, each before a dense one; no positions but the states'."""
    kinds = {"layer_types": ["mamba", "attention"] * 2, "position_embedding_type": "nope", "num_local_experts": 0}
    kinds |= {"num_experts_per_tok": 0, "intermediate_size": 96, "shared_intermediate_size": 96}
    states = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_expand": 2}
    shape = {**_SHAPE, "hidden_size": 256, "initializer_range": 0.2}
    return saved(folder, "GraniteMoeHybrid", **shape, **_HEADS, **kinds, **states)


def qwen3_next(folder, dense_layers=(0, 1, 2)):
    """Gated delta nets and gated attention, in turns; attention takes a good part of the output."""
    # vLLM needs a layer with experts, SGLang experts in all
    experts = {"mlp_only_layers": [*dense_layers], "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    experts |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    return _gated(folder, "Qwen3Next", **experts)


def qwen3_5(folder):
    """The same without experts."""
    return _gated(folder, "Qwen3_5", config="Qwen3_5TextConfig")


def _gated(folder, kind, **options):
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 64, "intermediate_size": 96}
    states = {"linear_num_value_heads": 16, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64}

    def change(model):
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(0.5)
            elif name.endswith("o_proj.weight"):
                parameter.mul_(4)
            elif name.endswith(("out_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)

    options |= {"written": {"full_attention_interval": 2}, "initializer_range": 0.1}
    return saved(folder, kind, change, **_SHAPE, **_HEADS, **kinds, **states, **options)


def _of_adapter(seed):
    """Matrices of rank 4, by the name of the retriever's parameter that they change."""
    import torch

    torch.manual_seed(seed)
    sizes = {"q_proj": 512, "k_proj": 128, "v_proj": 128}  # rows; all have 256 columns
    names = {f"model.layers.{layer}.self_attn.{name}": rows for layer in range(4) for name, rows in sizes.items()}
    return {name: (torch.randn(4, 256) / 16, torch.randn(rows, 4) / 8) for name, rows in names.items()}


def adapter(folder, seed):
    """The folder of a LoRA adapter of the retriever."""
    from safetensors.torch import save_file

    path = folder / str(seed)
    path.mkdir(parents=True)
    made = {
        f"base_model.model.{name}.lora_{kind}.weight": matrix.contiguous()
        for name, both in _of_adapter(seed).items()
        for kind, matrix in zip("AB", both, strict=True)
    }
    save_file(made, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def _retriever(folder, change):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(_RETRIEVER, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return str(folder)


def merged(folder):
    """The retriever with the second adapter in its weights."""

    def change(model):
        for name, (down, up) in _of_adapter(2).items():
            model.get_submodule(name).weight.add_(up @ down)

    return _retriever(folder, change)


def untied(folder):
    """The retriever with a matrix of its own for the output, which SGLang's last stage needs."""
    import torch

    def change(model):
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())

    return _retriever(folder, change)


PICTURE = 5296  # a token that the retriever's tokenizer does not have


def seeing(folder):
    """The retriever behind a small random model of pictures, 16 tokens each."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    reads = transformers.AutoModelForCausalLM.from_pretrained(_RETRIEVER, dtype=torch.float32)
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56}
    sees = transformers.CLIPVisionConfig(**size, patch_size=14)
    kinds = {"image_token_index": PICTURE, "image_seq_length": 16, "tie_word_embeddings": True}
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=sees, text_config=reads.config, **kinds)
    )
    model.model.language_model.load_state_dict(reads.model.state_dict())
    model.save_pretrained(folder)
    # the names of earlier releases of transformers, which vLLM reads
    weights = folder / "model.safetensors"
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in load_file(weights).items()}
    save_file(named, weights, {"format": "pt"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(_RETRIEVER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    strategy = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(pictures, tokenizer, **strategy).save_pretrained(folder)
    return str(folder)
