"""A model as Trainer puts it on the GPU.

The addresses are in the table: `init_mem_gpu_alloc_delta` of train_results.json.
"""

from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForQuestionAnswering

model = globals()["model"]
MODELS = {
    "bart-large": (BartForConditionalGeneration, BartConfig(vocab_size=50264)),
    "distilbart-12-6": (BartForConditionalGeneration, BartConfig(vocab_size=50264, decoder_layers=6)),
    "bart-base": (BartForConditionalGeneration, BartConfig(
        d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
        encoder_attention_heads=12, decoder_attention_heads=12,
    )),
    "bert-large-qa": (BertForQuestionAnswering, BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
    )),
}  # fmt: skip
kind, config = MODELS[model]
net = kind(config).to("cuda")
