"""Cells of third-party code: models with random weights from libraries, trained, evaluated, saved and generated from.

A cell writes devices as `DEVICE`, and binds what it computes to `out`. Nothing is downloaded.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.transfers.third_party_held_out import EDITS, HELD_OUT
from tests.transfers.third_party_uses import CELLS


@dataclass(frozen=True)
class Cell:
    """A cell, and the library that it is about."""

    library: str
    name: str
    code: str
    edits: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """What is done to the code where a phrase is in a piece of advice about it: what is replaced by what."""


TINY = "vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37"
CAUSAL = {
    "GPT2": "vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4",
    "GPTNeoX": TINY, "Llama": TINY + ", num_key_value_heads=2", "Mistral": TINY + ", num_key_value_heads=2",
    "Qwen2": TINY + ", num_key_value_heads=2", "Gemma": TINY + ", num_key_value_heads=2, head_dim=8",
    "Phi": TINY, "OPT": "vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=37, "
    "word_embed_proj_dim=32", "Bloom": "vocab_size=99, hidden_size=32, n_layer=2, n_head=4",
    "GPTJ": "vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4",
    "Falcon": TINY, "Starcoder2": TINY + ", num_key_value_heads=2", "Olmo": TINY, "Granite": TINY,
}  # fmt: skip
ENCODERS = {
    "Bert": TINY, "Roberta": TINY + ", pad_token_id=1, max_position_embeddings=64", "Electra": TINY + ", embedding_size=32",
    "DistilBert": "vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=37", "Albert": TINY + ", embedding_size=16",
    "MPNet": TINY, "DebertaV2": TINY, "Nystromformer": TINY + ", num_landmarks=8, segment_means_seq_len=16",
    "XLMRoberta": TINY + ", pad_token_id=1, max_position_embeddings=64", "MobileBert": TINY + ", embedding_size=32",
}  # fmt: skip
VISION = {
    "ViT": "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, image_size=32, patch_size=8",
    "DeiT": "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, image_size=32, patch_size=8",
    "Dinov2": "hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8",
    "ConvNext": "hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1]",
    "ResNet": "embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type='basic'",
    "Swin": "image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4",
    "Segformer": "num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], "
    "strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]",
}  # fmt: skip
TIMM = (
    "resnet18", "resnet26d", "mobilenetv3_small_050", "efficientnet_lite0", "vit_tiny_patch16_224", "convnext_atto",
    "regnetx_002", "ghostnet_050", "mixer_s32_224", "deit_tiny_patch16_224", "tinynet_e", "lcnet_035", "edgenext_xx_small",
    "mobilevit_xxs", "repvgg_a0", "semnasnet_050", "hardcorenas_a", "botnet26t_256", "poolformer_s12", "fbnetc_100",
)  # fmt: skip
TORCHVISION = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "regnet_y_400mf",
)  # fmt: skip
SCHEDULERS = (
    "DDPM", "DDIM", "PNDM", "EulerDiscrete", "EulerAncestralDiscrete", "DPMSolverMultistep", "IPNDM",
    "HeunDiscrete", "UniPCMultistep", "DEISMultistep",
)  # fmt: skip
OPTIMIZERS = (
    "torch.optim.AdamW({}, lr=1e-3)", "torch.optim.AdamW({}, lr=1e-3, foreach=False)", "torch.optim.SGD({}, lr=.1, momentum=.9)",
    "torch.optim.RMSprop({})", "torch.optim.Adagrad({})", "torch.optim.NAdam({})", "torch.optim.RAdam({})",
    "torch.optim.Adamax({})", "torch.optim.ASGD({})", "torch.optim.Rprop({})", "torch.optim.Adadelta({})",
    "timm.optim.Lamb({})", "timm.optim.AdaBelief({})", "timm.optim.Lookahead(torch.optim.SGD({}, lr=.1), k=2)",
    "transformers.optimization.Adafactor({})",
)  # fmt: skip


def cells() -> list[Cell]:
    """Return all cells, their names unique in a library."""
    return [
        *_transformers(),
        *_timm(),
        *_diffusers(),
        *_adapters(),
        *_trainers(),
        *_torchvision(),
        *_optimizers(),
        *_own(),
        *(
            _cell(library, name, code)
            for library, given in CELLS.items()
            for name, code in given.items()
        ),
    ]


def held_out_cells() -> list[Cell]:
    """Return cells of libraries that no other cell uses, and that need not be installed."""
    return [
        _cell(library, name, code)
        for library, given in HELD_OUT.items()
        for name, code in given.items()
    ]


def _cell(library: str, name: str, code: str) -> Cell:
    return Cell(library, name, textwrap.dedent(code).strip() + "\n", EDITS.get(name, {}))


def _transformers() -> Iterator[Cell]:
    ids = "ids = torch.arange(1, 17, device='cpu').reshape(2, 8).to('DEVICE')\n"
    for name, config in CAUSAL.items():
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        made = f"import transformers\nnet = transformers.{name}{head}(transformers.{name}Config({config})).to('DEVICE')\n"
        yield _cell(
            "transformers",
            f"{name} trains",
            made + ids + "loss = net(ids, labels=ids).loss\nloss.backward()\nout = loss.item()",
        )
        yield _cell(
            "transformers",
            f"{name} generates",
            made
            + ids
            + "out = net.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()",
        )
    beams = (
        "import transformers\nnet = transformers.GPT2LMHeadModel(transformers.GPT2Config("
        + CAUSAL["GPT2"]
        + ")).to('DEVICE').eval()\n"
        + ids
    )
    for what, options in {"beams": "num_beams=3", "samples": "do_sample=True, top_k=5", "top-p": "do_sample=True, top_p=.9",
                          "no repeats": "no_repeat_ngram_size=2", "penalty": "repetition_penalty=1.3"}.items():  # fmt: skip
        yield _cell(
            "transformers",
            f"GPT2 generates with {what}",
            beams + f"out = net.generate(ids, max_new_tokens=5, pad_token_id=0, {options}).shape",
        )
    for name, config in ENCODERS.items():
        made = f"import transformers\nnet = transformers.{name}Model(transformers.{name}Config({config})).to('DEVICE').eval()\n"
        yield _cell(
            "transformers",
            f"{name} with a mask",
            made
            + ids
            + "mask = torch.ones(2, 8); mask[0, 5:] = 0\nwith torch.no_grad(): out = net(ids, attention_mask=mask).last_hidden_state.mean().item()",
        )
    for name, config in VISION.items():
        yield _cell(
            "transformers",
            f"{name} sees",
            f"import transformers\nnet = transformers.{name}Model(transformers.{name}Config({config})).to('DEVICE').eval()\nwith torch.inference_mode(): out = net(pixel_values=torch.rand(2, 3, 32, 32)).last_hidden_state.mean().cpu()",
        )
    yield _cell(
        "transformers",
        "T5 trains and generates",
        "import transformers\nnet = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0)).to('DEVICE')\n"
        + ids
        + "net(input_ids=ids, labels=ids).loss.backward()\nout = net.generate(ids, max_new_tokens=3).tolist()",
    )
    yield _cell(
        "transformers",
        "a state dict saved and loaded",
        beams
        + "import io\nfile = io.BytesIO(); torch.save(net.state_dict(), file); file.seek(0)\nnet.load_state_dict(torch.load(file, map_location='cpu')); out = net(ids).logits.sum().item()",
    )


def _timm() -> Iterator[Cell]:
    for name in TIMM:
        size = 256 if "256" in name else 224 if "224" in name else 64
        yield _cell("timm", name, f"""
            import timm
            net = timm.create_model({name!r}, num_classes=5).to('DEVICE').eval()
            images = torch.rand(1, 3, {size}, {size}, device='cpu')
            with torch.no_grad(): out = net(images.to('DEVICE')).argmax(1).tolist()
            """)  # fmt: skip
    yield _cell("timm", "mixup, a model's average and a schedule", """
        import timm, timm.data, timm.loss, timm.utils, timm.scheduler
        net = timm.create_model('resnet18', num_classes=5).to('DEVICE')
        average = timm.utils.ModelEmaV2(net, decay=.9)
        optimizer = torch.optim.SGD(net.parameters(), lr=.1)
        schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=4)
        mix = timm.data.Mixup(mixup_alpha=.2, num_classes=5)
        x, y = mix(torch.rand(4, 3, 32, 32), torch.randint(0, 5, (4,)))
        for step in range(2):
            loss = timm.loss.SoftTargetCrossEntropy()(net(x), y.to('DEVICE')); loss.backward()
            optimizer.step(); optimizer.zero_grad(); schedule.step(step); average.update(net)
        out = timm.utils.accuracy(net(x), y.argmax(1))[0].item()
        """)  # fmt: skip


def _diffusers() -> Iterator[Cell]:
    net = "import diffusers\nnet = diffusers.UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, down_block_types=('DownBlock2D', 'AttnDownBlock2D'), up_block_types=('AttnUpBlock2D', 'UpBlock2D'), attention_head_dim=4).to('DEVICE')\n"
    for name in SCHEDULERS:
        yield _cell(
            "diffusers",
            f"{name} samples",
            net
            + f"with torch.device('cpu'):\n    steps = diffusers.{name}Scheduler(num_train_timesteps=50)\n    steps.set_timesteps(6, device='DEVICE')\nimage = torch.randn(1, 1, 8, 8) * steps.init_noise_sigma\nwith torch.no_grad():\n    for t in steps.timesteps:\n        image = steps.step(net(steps.scale_model_input(image, t), t).sample, t, image).prev_sample\nout = image.shape",
        )
    yield _cell(
        "diffusers",
        "a U-Net trains",
        net
        + "steps = diffusers.DDPMScheduler(50)\nclean, noise = torch.rand(2, 1, 8, 8), torch.randn(2, 1, 8, 8)\nt = torch.randint(0, 50, (2,))\nloss = torch.nn.functional.mse_loss(net(steps.add_noise(clean, noise, t), t).sample, noise); loss.backward()\nout = float(loss)",
    )
    yield _cell(
        "diffusers",
        "an autoencoder",
        "import diffusers\nnet = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8).to('DEVICE')\nx = torch.rand(1, 3, 8, 8)\nout = net(x).sample.sub(x).abs().mean().item()",
    )


def _adapters() -> Iterator[Cell]:
    base = (
        "import transformers, peft\nnet = transformers.GPT2LMHeadModel(transformers.GPT2Config("
        + CAUSAL["GPT2"]
        + "))\n"
    )
    configs = {
        "LoRA": "peft.LoraConfig(r=2, target_modules=['c_attn'], fan_in_fan_out=True)",
        "DoRA": "peft.LoraConfig(r=2, target_modules=['c_attn'], fan_in_fan_out=True, use_dora=True)",
        "IA3": "peft.IA3Config(target_modules=['c_attn', 'c_proj'], feedforward_modules=['c_proj'], fan_in_fan_out=True)",
        "prompt tuning": "peft.PromptTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=3)",
        "prefix tuning": "peft.PrefixTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=3)",
        "p-tuning": "peft.PromptEncoderConfig(task_type='CAUSAL_LM', num_virtual_tokens=3, encoder_hidden_size=8)",
    }  # fmt: skip
    for name, config in configs.items():
        yield _cell(
            "peft",
            name,
            base
            + f"net = peft.get_peft_model(net, {config}).to('DEVICE')\nids = torch.arange(8).reshape(1, 8)\nloss = net(input_ids=ids, labels=ids).loss; loss.backward()\nout = loss.item()",
        )
    yield _cell(
        "peft",
        "LoRA merged",
        base
        + "net = peft.get_peft_model(net, "
        + configs["LoRA"]
        + ").to('DEVICE')\nnet = net.merge_and_unload()\nout = net(torch.arange(8)[None]).logits.mean().cpu().item()",
    )


def _trainers() -> Iterator[Cell]:
    data = "from torch.utils.data import DataLoader, TensorDataset\nx, y = torch.rand(16, 4, device='cpu'), torch.rand(16, 1, device='cpu')\nloader = DataLoader(TensorDataset(x, y), batch_size=4)\nnet = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to('DEVICE')\noptimizer = torch.optim.AdamW(net.parameters())\n"
    loop = "for a, b in loader:\n    loss = torch.nn.functional.mse_loss(net(a.to('DEVICE')), b.to('DEVICE'))\n    optimizer.zero_grad(); {}; optimizer.step()\n"
    yield _cell(
        "accelerate",
        "a loop with gathered losses",
        "import accelerate\n"
        + data
        + "accelerator = accelerate.Accelerator(cpu=True)\nlosses = []\n"
        + loop.format(
            "accelerator.backward(loss); losses.append(accelerator.gather(loss.detach()))"
        )
        + "out = torch.stack(losses).mean().item()",
    )
    yield _cell(
        "accelerate",
        "accumulated gradients and clipping",
        "import accelerate\n"
        + data
        + "accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)\nfor a, b in loader:\n    with accelerator.accumulate(net):\n        loss = torch.nn.functional.mse_loss(net(a.to('DEVICE')), b.to('DEVICE')); accelerator.backward(loss)\n        accelerator.clip_grad_norm_(net.parameters(), 1.); optimizer.step(); optimizer.zero_grad()\nout = loss.item()",
    )
    yield _cell(
        "accelerate",
        "empty weights and a device map",
        "import accelerate\nwith accelerate.init_empty_weights(): net = torch.nn.Linear(4, 4)\nnet = net.to_empty(device='DEVICE'); torch.nn.init.ones_(net.weight); torch.nn.init.zeros_(net.bias)\nnet = accelerate.dispatch_model(net, {'': 'cpu'}, force_hooks=True)\nout = net(torch.ones(1, 4)).tolist()",
    )
    yield _cell(
        "torchmetrics",
        "accuracy over a loader",
        "import torchmetrics\n"
        + data
        + "metric = torchmetrics.MeanSquaredError().to('DEVICE')\nwith torch.no_grad():\n    for a, b in loader: metric.update(net(a.to('DEVICE')), b.to('DEVICE'))\nout = metric.compute().item()",
    )
    for name, call in {
        "confusion": "torchmetrics.classification.MulticlassConfusionMatrix(3)",
        "f1": "torchmetrics.classification.MulticlassF1Score(3)",
        "auroc": "torchmetrics.classification.MulticlassAUROC(3)",
    }.items():
        yield _cell(
            "torchmetrics",
            name,
            f"import torchmetrics\nmetric = {call}.to('DEVICE')\nmetric.update(torch.rand(20, 3).softmax(1), torch.arange(20, device='cpu').remainder(3).to('DEVICE'))\nout = metric.compute().tolist()",
        )
    yield _cell(
        "lightning",
        "a module steps by hand",
        "import lightning\nclass Net(lightning.LightningModule):\n    def __init__(self):\n        super().__init__(); self.layer = torch.nn.Linear(4, 1)\n    def training_step(self, batch, index):\n        a, b = batch; return torch.nn.functional.mse_loss(self.layer(a), b)\n    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=.1)\n"
        + data
        + "net = Net().to('DEVICE'); optimizer = net.configure_optimizers()\nfor index, batch in enumerate(loader):\n    loss = net.training_step([each.to(net.device) for each in batch], index); loss.backward(); optimizer.step()\nout = loss.item()",
    )


def _torchvision() -> Iterator[Cell]:
    for name in TORCHVISION:
        yield _cell(
            "torchvision",
            f"{name} trains",
            f"import torchvision\nnet = torchvision.models.{name}(num_classes=5).to('DEVICE')\nloss = torch.nn.functional.cross_entropy(net(torch.rand(2, 3, 64, 64)), torch.tensor([1, 2]))\nloss.backward()\nout = loss.item() > 0",
        )
    yield _cell(
        "torchvision",
        "transforms",
        "import torchvision.transforms.v2 as T\npipe = T.Compose([T.RandomHorizontalFlip(1.), T.Resize(8), T.ToDtype(torch.float32, scale=True), T.Normalize([.5] * 3, [.2] * 3)])\nout = pipe(torch.arange(768, device='cpu', dtype=torch.uint8).reshape(3, 16, 16).to('DEVICE')).mean().item()",
    )
    yield _cell(
        "torchvision",
        "a grid of images",
        "import torchvision\nout = torchvision.utils.make_grid(torch.rand(4, 3, 5, 5)).cpu().numpy().shape",
    )


def _optimizers() -> Iterator[Cell]:
    for call in OPTIMIZERS:
        made = call.format("net.parameters()")
        library = call.partition(".")[0]
        yield _cell(
            library,
            call.partition("(")[0] + (" by tensor" if "foreach" in call else ""),
            (
                ""
                if library == "torch"
                else f"import {library}, {library}.optim\n"
                if library == "timm"
                else f"import {library}.optimization\n"
            )
            + f"net = torch.nn.Linear(4, 2).to('DEVICE'); optimizer = {made}\nfor _ in range(3):\n    optimizer.zero_grad(); loss = net(torch.ones(2, 4)).pow(2).sum(); loss.backward(); optimizer.step()\nout = loss.item()",
        )


def _own() -> Iterator[Cell]:
    """What the tutorials do with torch alone."""
    given = {
        "word vectors": "net = torch.nn.Embedding(9, 4)\nlogits = net(torch.tensor([1, 2, 3])) @ net.weight.T\nout = logits.argmax(1).tolist()",
        "characters by an LSTM": "net = torch.nn.LSTM(4, 8, batch_first=True); y, (h, c) = net(torch.rand(2, 5, 4)); y.sum().backward(); out = h.detach().cpu().shape",
        "packed sequences": "from torch.nn.utils.rnn import pack_padded_sequence\nnet = torch.nn.GRU(3, 4, batch_first=True)\ny, h = net(pack_padded_sequence(torch.rand(2, 5, 3), torch.tensor([5, 3], device='cpu'), batch_first=True)); out = h.shape",
        "a transformer with a causal mask": "net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()\nmask = torch.nn.Transformer.generate_square_subsequent_mask(4)\nout = net(torch.ones(2, 4, 8), src_mask=mask).mean().item()",
        "beam search by hand": "scores = torch.rand(20)\nbeam = []\nfor _ in range(3):\n    best = scores.argmax(); beam.append(best.item()); scores[best] = -1\nout = beam",
        "replay of a DQN": "memory = [(torch.rand(4), i % 2, float(i)) for i in range(12)]\nnet = torch.nn.Linear(4, 2)\nstates = torch.stack([m[0] for m in memory]); actions = torch.tensor([m[1] for m in memory])[:, None]\nq = net(states).gather(1, actions).squeeze(1)\nloss = torch.nn.functional.smooth_l1_loss(q, torch.tensor([m[2] for m in memory])); loss.backward(); out = loss.item()",
        "an adversarial example": "net = torch.nn.Linear(4, 3); x = torch.ones(1, 4, requires_grad=True)\nloss = torch.nn.functional.cross_entropy(net(x), torch.tensor([1])); loss.backward()\nout = (x + .1 * x.grad.sign()).detach().cpu().numpy().tolist()",
        "style by Gram matrices": "x = torch.rand(1, 3, 8, 8, requires_grad=True)\noptimizer = torch.optim.LBFGS([x], max_iter=3)\ndef closure():\n    optimizer.zero_grad(); f = x.flatten(2)[0]; loss = (f @ f.T / 192).pow(2).sum(); loss.backward(); return loss\noptimizer.step(closure); out = x.sum().isfinite().item()",
        "pruning": "import torch.nn.utils.prune as prune\nnet = torch.nn.Linear(6, 4); prune.l1_unstructured(net, 'weight', amount=.5)\nout = int((net.weight == 0).sum())",
        "spectral norm": "net = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)); out = net(torch.ones(1, 4)).sum().item() is not None",
        "k-means": "x = torch.rand(30, 2); c = x[:3].clone()\nfor _ in range(4):\n    a = torch.cdist(x, c).argmin(1)\n    c = torch.stack([x[a == k].mean(0) if (a == k).any() else c[k] for k in range(3)])\nout = len(a.unique())",
        "nonzero, where and masks": "x = torch.arange(12.).reshape(3, 4)\nrows, columns = torch.where(x > 5)\nx[x > 8] = 0.; x[rows, columns] += 1\nout = x[x > 2].tolist()",
        "per-sample gradients": "net = torch.nn.Linear(3, 1)\nfrom torch.func import functional_call, grad, vmap\np = dict(net.named_parameters())\ng = vmap(grad(lambda p, x: functional_call(net, p, (x,)).sum()), (None, 0))(p, torch.rand(5, 3))\nout = g['weight'].shape",
        "a Jacobian and a Hessian": "from torch.func import hessian, jacrev\nf = lambda v: (v ** 3).sum()\nout = jacrev(f)(torch.ones(3)).tolist(), hessian(f)(torch.ones(3)).diagonal().tolist()",
        "forward mode": "import torch.autograd.forward_ad as fwAD\nwith fwAD.dual_level():\n    d = fwAD.make_dual(torch.ones(3), torch.ones(3)); out = fwAD.unpack_dual(d.sin()).tangent.tolist()",
        "checkpointed blocks": "from torch.utils.checkpoint import checkpoint_sequential\nnet = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])\ny = checkpoint_sequential(net, 2, torch.ones(2, 4, requires_grad=True), use_reentrant=False); y.sum().backward(); out = net[0].weight.grad.shape",
        "averaged weights": "net = torch.nn.Linear(2, 2); swa = torch.optim.swa_utils.AveragedModel(net)\nfor _ in range(2): swa.update_parameters(net)\nout = swa.n_averaged.item()",
        "gradients clipped by norm": "net = torch.nn.Linear(4, 4); net(torch.ones(1, 4)).sum().backward(); out = float(torch.nn.utils.clip_grad_norm_(net.parameters(), .1)) > 0",
        "autocast": "net = torch.nn.Linear(4, 4)\nwith torch.autocast('cpu', dtype=torch.bfloat16): y = net(torch.ones(1, 4))\nout = y.dtype == torch.float32 or y.dtype == torch.bfloat16",
        "a weighted sampler": "from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler\ndata = TensorDataset(torch.arange(8., device='cpu'))\nloader = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.] * 8, 8, generator=torch.Generator('DEVICE').manual_seed(0)))\nout = [float(b.to('DEVICE').sum()) for (b,) in loader]",
        "a random split": "from torch.utils.data import random_split\na, b = random_split(range(10), [7, 3], generator=torch.Generator('DEVICE').manual_seed(0)); out = sorted([*a, *b])",
        "early stopping": "best, left = float('inf'), 2\nfor loss in torch.tensor([3., 2., 2.5, 2.6]):\n    if loss < best: best, left = loss.item(), 2\n    else: left -= 1\n    if not left: break\nout = best",
        "a histogram for a plot": "out = torch.histc(torch.arange(10.), 5).cpu().numpy().tolist()",
        "a table in pandas": "import pandas as pd\nframe = pd.DataFrame({'a': torch.arange(3.).cpu().numpy(), 'b': torch.ones(3).tolist()}); out = frame.sum().tolist()",
        "a module's summary": "net = torch.nn.Linear(3, 2); print(net, net.bias, sum(p.numel() for p in net.parameters())); out = True",
        "saved, loaded and compared": "import io\nnet = torch.nn.Linear(3, 2); file = io.BytesIO(); torch.save(net.state_dict(), file); file.seek(0)\nstate = torch.load(file); out = all(torch.equal(state[k], v) for k, v in net.state_dict().items())",
        "compiled": "net = torch.nn.Linear(3, 2); out = torch.compile(net, backend='eager')(torch.ones(1, 3)).shape",
        "compiled with a break": "def f(x):\n    if x.sum() > 0: return x + 1\n    return x - 1\nout = torch.compile(f, backend='eager')(torch.ones(3)).tolist()",
        "exported": "net = torch.nn.Linear(3, 2); out = torch.export.export(net, (torch.ones(1, 3),)).module()(torch.ones(1, 3)).shape",
        "scripted": "net = torch.jit.script(torch.nn.Linear(3, 2)); out = net(torch.ones(1, 3)).shape",
        "traced": "net = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3), check_trace=False); out = net(torch.ones(1, 3)).shape",
        "symbolically traced": "import torch.fx\nout = torch.fx.symbolic_trace(torch.nn.Linear(3, 2))(torch.ones(1, 3)).shape",
        "threads that fetch ahead": "import queue, threading\nqueued = queue.Queue()\ndef work():\n    for i in range(3): queued.put(torch.full((4,), float(i), device='cpu').to('DEVICE'))\nthread = threading.Thread(target=work); thread.start(); thread.join()\nout = [float(queued.get().sum()) for _ in range(3)]",
        "numbers in a dict of metrics": "m = {'loss': torch.tensor(1.5), 'acc': torch.tensor(.5)}; out = {k: round(float(v), 2) for k, v in m.items()}",
    }  # fmt: skip
    for name, code in given.items():
        yield _cell("torch", name, code)
