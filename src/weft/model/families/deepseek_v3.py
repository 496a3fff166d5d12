"""DeepSeek V3 and R1: latent attention, sigmoid routers with groups of experts, and a shared expert."""

from __future__ import annotations

from weft.model.families._family import Config, Family
from weft.model.families._tables import CutTable, Tables
from weft.model.profile import ModelSizes


class DeepseekV3(Family):
    model_types = ("deepseek_v3",)
    router = "model.layers.*.mlp.gate"
    scoring = "sigmoid"

    def sizes(self, config: Config) -> ModelSizes:
        rope, width = config.get("qk_rope_head_dim") or 64, config.get("moe_intermediate_size") or 2048
        return ModelSizes(
            name="deepseek_v3",
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            head_size=(config.get("qk_nope_head_dim") or 128) + rope,
            value_head_size=config.get("v_head_dim") or 128,
            query_rank=config.get("q_lora_rank", 1536) or 0,
            kv_rank=config.get("kv_lora_rank") or 512,
            rope_head_size=rope,
            ffn_size=config["intermediate_size"],
            vocabulary_size=config["vocab_size"],
            sequence_length=config.get("max_position_embeddings") or 4096,
            num_experts=config.get("n_routed_experts") or 256,
            top_k=config.get("num_experts_per_tok") or 8,
            expert_ffn_size=width,
            shared_ffn_size=width * (config.get("n_shared_experts") or 1),
            leading_dense_layers=config.get("first_k_dense_replace", 3),
            attention_dropout=float(config.get("attention_dropout") or 0.0),
            qkv_bias=bool(config.get("attention_bias")),
            output_bias=bool(config.get("attention_bias")),
            rotary_base=float((config.get("rope_parameters") or {}).get("rope_theta") or 10_000.0),
            norm_epsilon=float(config.get("rms_norm_eps") or 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        return Tables(
            limits={
                "tensor": "all heads of its latent attention share one rotary key, of which no rule says whose gradient"
                " it is"
            },
            cut=CutTable(
                entry="model.embed_tokens",
                blocks=tuple(f"model.layers.{index}" for index in range(sizes.num_layers)),
                tail=("model.norm", "lm_head"),
            ),
            vocabulary_head="lm_head",
        )


FAMILY = DeepseekV3()
