"""Cells that read a loss, a metric or a norm from the device each step: what few notebooks do without.

A cell is what stands between two lines of ``# %% NAME: RUNS``; what it is allowed is that many runs. Before each of
them `SETUP` has run. None of these decides anything by what it reads, unless its number says so.
"""

from __future__ import annotations

import re

SETUP = """
import math, statistics, json, logging, collections
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = [(torch.randn(32, 256), torch.randint(0, 10, (32,))) for _ in range(4)]
def step(x, y):
    optimizer.zero_grad()
    out = model(x.cuda())
    loss = F.cross_entropy(out, y.cuda())
    loss.backward()
    optimizer.step()
    return loss, out
"""

CELLS = """
# %% prints the loss: 1
for x, y in data:
    loss, _ = step(x, y)
    print(loss.item(), f"{loss.item():.4f}", "%.3f" % loss.item(), "{:.2e}".format(loss.item()), loss)
# %% sums and averages: 1
total = 0.0
for x, y in data:
    loss, _ = step(x, y)
    total += loss.item() * len(x)
print(total / 128, round(total / len(data), 3))
# %% keeps a list and averages it: 1
losses = []
for x, y in data:
    losses.append(step(x, y)[0].item())
print(sum(losses) / len(losses), np.mean(losses), statistics.mean(losses), max(losses), min(losses), np.std(losses))
# %% converts with float: 1
losses = []
for x, y in data:
    losses.append(float(step(x, y)[0]))
print(float(f"{losses[-1]:.4f}"))
# %% a clipped norm: 1
norms = []
for x, y in data:
    optimizer.zero_grad()
    F.cross_entropy(model(x.cuda()), y.cuda()).backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
print(norms)
# %% accuracy by counting: 1
correct = total = 0
for x, y in data:
    _, out = step(x, y)
    correct += (out.argmax(1) == y.cuda()).sum().item()
    total += len(y)
print(f"{correct / total:.1%}", correct, "%d of %d" % (correct, total))
# %% perplexity: 1
for x, y in data:
    print(math.exp(step(x, y)[0].item()))
# %% an exponential average: 1
smooth = None
for x, y in data:
    value = step(x, y)[0].item()
    smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
    print(smooth)
# %% a meter: 1
class Meter:
    def __init__(self):
        self.sum, self.count = 0, 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
    @property
    def average(self):
        return self.sum / self.count
meter = Meter()
for x, y in data:
    meter.update(step(x, y)[0].item(), len(y))
print(meter.average)
# %% a history of dicts: 1
history = []
for x, y in data:
    loss, out = step(x, y)
    history.append({"loss": loss.item(), "accuracy": (out.argmax(1) == y.cuda()).float().mean().item()})
print(json.dumps(history), json.dumps(history, indent=2))
# %% logged: 1
log = logging.getLogger("training")
for x, y in data:
    log.warning("loss %.4f %s", step(x, y)[0].item(), step(x, y)[0].item())
# %% tqdm shows it: 1
from tqdm import tqdm
bar = tqdm(data)
for x, y in bar:
    bar.set_postfix(loss=step(x, y)[0].item())
    bar.set_description(f"{step(x, y)[0].item():.3f}")
# %% a deque of losses: 1
recent = collections.deque(maxlen=3)
for x, y in data:
    recent.append(step(x, y)[0].item())
    print(sum(recent) / len(recent))
# %% a norm by hand: 1
for x, y in data:
    step(x, y)
    norm = sum(p.grad.detach().norm().item() ** 2 for p in model.parameters()) ** 0.5
    print(norm)
# %% several losses: 1
for x, y in data:
    optimizer.zero_grad()
    out = model(x.cuda())
    parts = {"ce": F.cross_entropy(out, y.cuda()), "l2": 1e-3 * out.square().mean()}
    sum(parts.values()).backward()
    optimizer.step()
    print({name: each.item() for name, each in parts.items()})
# %% numbers of a batch: 1
for x, y in data:
    losses = F.cross_entropy(model(x.cuda()), y.cuda(), reduction="none").detach()
    print(losses.tolist()[:3], sum(losses.tolist()))
# %% a rate that is scaled: 1
rates = []
for x, y in data:
    loss, _ = step(x, y)
    rates.append(abs(loss.item()) / (1 + loss.item()) - loss.item() ** 2)
print(rates[-1] // 1, -rates[0], math.floor(rates[0]))
# %% a validation loop: 1
@torch.no_grad()
def validate():
    model.eval()
    total = right = 0.0
    for x, y in data:
        out = model(x.cuda())
        total += F.cross_entropy(out, y.cuda(), reduction="sum").item()
        right += (out.argmax(1) == y.cuda()).sum().item()
    model.train()
    return total / 128, right / 128
for x, y in data:
    step(x, y)
print("loss %.3f, accuracy %.3f" % validate())
# %% a scaler: 1
scaler = torch.amp.GradScaler("cuda")
for x, y in data:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(loss.item(), scaler.get_scale())
# %% keeps the best loss: 2
best = float("inf")
for x, y in data:
    loss = step(x, y)[0].item()
    if loss < best:
        best = loss
        print("better")
# %% early stopping: 2
best, waited = 1e9, 0
for x, y in data:
    loss = step(x, y)[0].item()
    if loss < best - 1e-3:
        best, waited = loss, 0
    else:
        waited += 1
        if waited > 2:
            break
# %% stops at a nan: 2
for x, y in data:
    loss = step(x, y)[0]
    if math.isnan(loss.item()):
        print("nan")
# %% a plateau: 3
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
for x, y in data:
    schedule.step(step(x, y)[0].item())
# %% predictions on the host: 1
found = []
for x, y in data:
    found.append(model(x.cuda()).argmax(1).cpu())
print(torch.cat(found).shape, (torch.cat(found) == 3).float().mean().item())
# %% predictions that are saved and counted: 1
import io
found, hits = [], 0
for x, y in data:
    out = model(x.cuda()).detach().cpu()
    hits += (out.argmax(1) == y).sum().item()
    found.append(out.softmax(1))
torch.save(torch.cat(found), io.BytesIO())
print(torch.stack(found).mean(0)[0].tolist(), hits / 128)
# %% a decision by a value that the host put there: 2
limit = torch.tensor(1).cuda()
x = torch.randn(1024, 1024).cuda().requires_grad_()
h = x * 1
if limit.item() > 0:
    sum(h * each for each in range(1, 9)).sum().backward()
# %% accelerate: 1
from accelerate import Accelerator
accelerator = Accelerator()
net, opt = accelerator.prepare(nn.Linear(256, 10), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
total = 0.0
for x, y in data:
    loss = F.cross_entropy(net(x.cuda()), y.cuda())
    accelerator.backward(loss)
    total += accelerator.gather(loss.detach()).mean().item()
print(total / len(data))
# %% a language model: 1
from transformers import GPT2Config, GPT2LMHeadModel
gpt = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=500)).cuda()
opt = torch.optim.AdamW(gpt.parameters())
for _ in range(3):
    tokens = torch.randint(0, 500, (2, 16)).cuda()
    loss = gpt(tokens, labels=tokens).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(loss.item(), math.exp(loss.item()))
# %% timm: 1
import timm
from timm.utils import AverageMeter
net = timm.create_model("resnet18", num_classes=10).cuda()
losses = AverageMeter()
for _ in range(2):
    images, labels = torch.randn(2, 3, 32, 32).cuda(), torch.randint(0, 10, (2,)).cuda()
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    losses.update(loss.item(), len(labels))
print(losses.avg, losses.val)
# %% two losses of a game: 1
critic = nn.Linear(10, 1).cuda()
for x, y in data:
    loss, out = step(x, y)
    wrong = critic(out.detach()).mean()
    wrong.backward()
    print(f"{loss.item():.2f} {wrong.item():.2f} {(loss.item() + wrong.item()) / 2:.2f}")
# %% a reward: 1
rewards = []
for x, y in data:
    _, out = step(x, y)
    rewards.append(out.detach().softmax(1).max(1).values.mean().item())
print(np.average(rewards), statistics.median(rewards), sorted(map(str, rewards)))
# %% torchmetrics: 4
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
metrics = MetricCollection({f"top{k}": MulticlassAccuracy(10, top_k=k, average="micro") for k in (1, 3)}).cuda()
losses = MeanMetric().cuda()
for x, y in data:
    loss, out = step(x, y)
    metrics.update(out.detach(), y.cuda())
    losses.update(loss.detach())
print({name: each.item() for name, each in metrics.compute().items()}, losses.compute().item())
metrics.reset()
# %% skorch: 4
from skorch import NeuralNetClassifier
net = NeuralNetClassifier(model, criterion=nn.CrossEntropyLoss, max_epochs=2, lr=0.1, device="cuda", verbose=1)
net.fit(torch.cat([x for x, _ in data]).numpy(), torch.cat([y for _, y in data]).numpy())
print(net.history[-1, "train_loss"], net.history[-1, "valid_acc"])
# %% a schedule that waits for the scaler: 2
scaler = torch.amp.GradScaler("cuda")
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
for x, y in data:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= before:
        schedule.step()
    print(f"{loss.item():.4f} {norm.item():.2f} {scaler.get_scale():g} {schedule.get_last_lr()[0]:.2e}")
# %% rows of a dashboard: 1
class Dashboard:
    def __init__(self):
        self.rows, self.summary = [], {}
    def log(self, values, step):
        flat = {name: each.item() if torch.is_tensor(each) else each for name, each in values.items()}
        self.rows.append({"_step": step, **flat})
        self.summary.update({name: each for name, each in flat.items() if isinstance(each, (int, float))})
board = Dashboard()
for number, (x, y) in enumerate(data):
    loss, out = step(x, y)
    right = (out.argmax(1) == y.cuda()).float().mean()
    board.log({"train/loss": loss, "train/accuracy": right.item(), "lr": optimizer.param_groups[0]["lr"]}, number)
print(json.dumps(board.rows[-1]), board.summary)
# %% a confusion matrix on the host: 4
confusion = torch.zeros(10, 10, dtype=torch.int64)
for x, y in data:
    found = step(x, y)[1].argmax(1).cpu()
    for true, predicted in zip(y.view(-1), found.view(-1)):
        confusion[true.long(), predicted.long()] += 1
print(confusion.diag() / confusion.sum(1).clamp(min=1), confusion.trace().item() / confusion.sum().item())
# %% gradient norms by layer: 3
for x, y in data:
    step(x, y)
    norms = {name: p.grad.norm(2).item() for name, p in model.named_parameters() if p.grad is not None}
    worst = max(norms, key=norms.get)
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    print(" ".join(f"{name}={norm:.3f}" for name, norm in norms.items()), worst, f"{total:.3f}")
# %% a smooth loss that ends the loop: 6
smooth, weight = None, 0.98
for number, (x, y) in enumerate(data, 1):
    value = step(x, y)[0].item()
    smooth = value if smooth is None else weight * smooth + (1 - weight) * value
    corrected = smooth / (1 - weight**number)
    if number > 2 and corrected > 4 * smooth or corrected < 1e-4:
        break
    print(f"{corrected:.4f}")
# %% a mean of the last losses that ends the loop: 4
recent = collections.deque(maxlen=2)
for x, y in data:
    recent.append(step(x, y)[0].item())
    if len(recent) == recent.maxlen and statistics.mean(recent) < 1e-3:
        break
# %% arrays of losses: 1
losses, scores = [], []
for x, y in data:
    loss, out = step(x, y)
    losses.append(loss.detach().cpu().numpy())
    scores.append(out.detach().softmax(1).cpu().numpy())
print(np.mean(losses), np.concatenate(scores).argmax(1)[:4], f"{np.std(losses):.3f}")
# %% pandas: 3
import pandas
rows = []
for number, (x, y) in enumerate(data):
    loss, out = step(x, y)
    rows.append({"step": number, "loss": loss.item(), "accuracy": (out.argmax(1) == y.cuda()).float().mean().item()})
table = pandas.DataFrame(rows).set_index("step")
print(table.to_string(), table["loss"].mean(), table.tail(1).to_dict("records"))
# %% a plateau over a validation loss: 4
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
for epoch in range(2):
    for number, (x, y) in enumerate(data):
        step(x, y)
        restarts.step(epoch + number / len(data))
    with torch.no_grad():
        losses = [F.cross_entropy(model(x.cuda()), y.cuda()).item() for x, y in data]
    validation = sum(losses) / len(losses)
    plateau.step(validation)
    try:
        perplexity = math.exp(validation)
    except OverflowError:
        perplexity = float("inf")
    print(f"epoch {epoch}: {validation:.3f}, perplexity {perplexity:.1f}")
# %% arrays that are shown: 1
rows = []
for x, y in data:
    loss, out = step(x, y)
    found, true = out.detach().argmax(1).cpu().numpy(), y.numpy()
    rows.append((found == true).mean())
    spread = out.detach().cpu().numpy().std()
    print(found[:4], found.shape, f"{rows[-1]:.3f}", (found == true).sum() / len(true), spread)
print(np.array(rows).mean(), np.mean(rows).item(), np.concatenate([found, found]).tolist()[:3], np.round(rows, 3))
# %% arrays in a state of its own: 1
from dataclasses import dataclass, field
@dataclass
class State:
    loss: float = 0.0
    losses: list = field(default_factory=list)
state, running = State(), collections.deque(maxlen=100)
for x, y in data:
    loss, out = step(x, y)
    state.loss = 0.9 * state.loss + 0.1 * loss.item()
    state.losses.append(out.detach().float().cpu().numpy())
    running.append(loss.detach().cpu().numpy())
    print(f"{state.loss:.4f} {np.mean(running):.4f} {np.asarray(running).max():>8.2e}", state)
print(np.vstack(state.losses).mean(axis=0).round(2), torch.from_numpy(state.losses[-1]).softmax(1).mean().item())
# %% a tensor of losses: 1
losses = []
for x, y in data:
    losses.append(step(x, y)[0].item())
print(torch.tensor(losses).mean().item(), torch.tensor(losses), torch.tensor(losses).std())
# %% rich and pandas rows: 1
from types import SimpleNamespace
log = SimpleNamespace(rows=[])
for number, (x, y) in enumerate(data):
    loss, out = step(x, y)
    log.rows.append(dict(step=number, loss=round(loss.item(), 4), right=f"{loss:.1%}"))
    print(*log.rows[-1].values(), sep=" | ")
# %% formats of all kinds: 1
from string import Template
for x, y in data:
    loss, out = step(x, y)
    value, right = loss.item(), (out.argmax(1) == y.cuda()).sum().item()
    print(f"{loss:.4f} {value!r} {value:>10.3e} {value:{8}.{2}f} {right:3d}/{len(y)} {100 * right / len(y):.1f}%")
    print("loss: " + str(value), "%8.3f|%s|%d" % (value, value, right), "{0:.2f} {n}".format(value, n=right))
    print(Template("$loss").substitute(loss=value), round(value, 4), [value], {"loss": value}, loss, sep=" | ")
"""


def cells() -> dict[str, tuple[int, str]]:
    """Return the runs that each cell is allowed and its code, by name."""
    told = re.split(r"(?m)^# %% (.+): (\d+)\n", CELLS)[1:]
    return {
        name: (int(runs), code)
        for name, runs, code in zip(told[::3], told[1::3], told[2::3], strict=True)
    }
