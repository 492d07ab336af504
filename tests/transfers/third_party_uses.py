"""Cells that use third-party libraries around a model: arrays, tables, images, graphs, solvers, trainers, checkpoints.

By library, as its package is called, and by what the cell does.
"""

from __future__ import annotations

DATA = """
from torch.utils.data import DataLoader, TensorDataset
x, y = torch.rand(16, 4, device='cpu'), torch.rand(16, 1, device='cpu')
loader = DataLoader(TensorDataset(x, y), batch_size=4)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to('DEVICE')
optimizer = torch.optim.AdamW(net.parameters())
"""
GRAPH = """
import torch_geometric
from torch_geometric.data import Data
edges = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
nodes = torch.rand(4, 5)
"""
IMAGES = """
import kornia
images = torch.rand(2, 3, 16, 16)
"""
LIGHTNING = """
import lightning, logging, warnings
logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x.to('DEVICE')), y.to('DEVICE'))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=.1)
"""
LANGUAGE = """
import transformers
config = transformers.GPT2Config(vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4)
net = transformers.GPT2LMHeadModel(config).to('DEVICE')
ids = torch.arange(1, 17).reshape(2, 8)
"""
UNET = """
import diffusers
net = diffusers.UNet2DModel(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=('DownBlock2D', 'DownBlock2D'), up_block_types=('UpBlock2D', 'UpBlock2D'),
).to('DEVICE')
"""

CELLS = {
    "numpy": {
        "an array to the device and back": """
            import numpy as np
            a = np.arange(12, dtype=np.float32).reshape(3, 4)
            t = torch.from_numpy(a).to('DEVICE')
            out = (t * 2).cpu().numpy().sum()
            """,
        "a list of arrays becomes a batch": """
            import numpy as np
            arrays = [np.full(3, i, dtype=np.float32) for i in range(4)]
            batch = torch.tensor(np.stack(arrays))
            out = np.asarray(batch.cpu()).tolist()
            """,
        "columns of tensors in an object array": """
            import numpy as np
            kept = np.empty(3, dtype=object)
            for i in range(3):
                kept[i] = torch.full((i + 1,), float(i))
            out = [len(t) for t in kept]
            """,
        "moving averages of losses": """
            import numpy as np
            losses = []
            for i in range(6):
                losses.append(torch.tensor(1. / (i + 1)).item())
            out = np.convolve(losses, np.ones(3) / 3, mode='valid').tolist()
            """,
        "indexing by an array": """
            import numpy as np
            t = torch.arange(10.)
            out = t[np.array([1, 3, 5])].tolist()
            """,
        "a scalar of numpy as a factor": """
            import numpy as np
            out = (torch.ones(3) * np.float32(2.5) + np.int64(1)).tolist()
            """,
    },
    "pandas": {
        "a table of results by epoch": """
            import pandas as pd
            rows = []
            for epoch in range(3):
                loss = torch.tensor([3., 2., 1.])[epoch]
                rows.append({'epoch': epoch, 'loss': loss.item(), 'best': bool(loss < 2)})
            out = pd.DataFrame(rows).loss.tolist()
            """,
        "tensors in a column": """
            import pandas as pd
            frame = pd.DataFrame({'name': ['a', 'b'], 'vector': [torch.ones(3), torch.zeros(3)]})
            out = float(torch.stack(list(frame.vector)).sum())
            """,
        "features from a table, with gaps filled": """
            import pandas as pd
            frame = pd.DataFrame({'a': [1., None, 3.], 'b': [4., 5., 6.]}).fillna(0.)
            x = torch.tensor(frame.values, dtype=torch.float32)
            out = torch.nn.functional.normalize(x).sum().isfinite().item()
            """,
        "codes of categories embedded": """
            import pandas as pd
            codes = pd.Series(['x', 'y', 'x']).astype('category').cat.codes
            out = torch.nn.Embedding(2, 4)(torch.tensor(codes.to_numpy().copy(), dtype=torch.long)).shape
            """,
        "predictions grouped": """
            import pandas as pd
            scores = torch.tensor([.1, .9, .8, .2])
            frame = pd.DataFrame({'group': list('aabb'), 'hit': (scores > .5).cpu().numpy()})
            out = frame.groupby('group').hit.mean().tolist()
            """,
    },
    "scikit-learn": {
        "clusters of embeddings": """
            from sklearn.cluster import KMeans
            vectors = torch.nn.Linear(4, 2).to('DEVICE')(torch.eye(4)).detach()
            out = KMeans(2, n_init=1, random_state=0).fit(vectors.cpu().numpy()).labels_.shape
            """,
        "a split, scaled and trained on": """
            from sklearn.datasets import make_classification
            from sklearn.model_selection import train_test_split
            from sklearn.preprocessing import StandardScaler
            X, y = make_classification(40, 6, random_state=0)
            a, b, c, d = train_test_split(StandardScaler().fit_transform(X), y, random_state=0)
            a, c = torch.tensor(a, dtype=torch.float32), torch.tensor(c)
            net = torch.nn.Linear(6, 2)
            loss = torch.nn.functional.cross_entropy(net(a), c)
            loss.backward()
            out = loss.item() > 0
            """,
        "scores of predictions": """
            from sklearn.metrics import accuracy_score, f1_score
            labels = torch.tensor([0, 1, 1, 0])
            guesses = torch.tensor([[2., 1.], [0., 1.], [3., 1.], [1., 0.]]).argmax(1)
            out = accuracy_score(labels.cpu(), guesses.cpu()), f1_score(labels.tolist(), guesses.tolist())
            """,
        "principal components for a plot": """
            from sklearn.decomposition import PCA
            hidden = torch.randn(20, 8)
            out = PCA(2).fit_transform(hidden.cpu().numpy()).shape
            """,
        "neighbours of a query": """
            from sklearn.neighbors import NearestNeighbors
            base = torch.eye(5)
            index = NearestNeighbors(n_neighbors=1).fit(base.cpu())
            out = index.kneighbors(base[2:3].cpu(), return_distance=False).tolist()
            """,
    },
    "scipy": {
        "a matching for a detector": """
            from scipy.optimize import linear_sum_assignment
            cost = torch.cdist(torch.arange(6.).reshape(3, 2), torch.arange(6.).flip(0).reshape(3, 2))
            rows, columns = linear_sum_assignment(cost.cpu().numpy())
            out = cost[rows, columns].shape
            """,
        "a sparse matrix": """
            import numpy as np
            import scipy.sparse
            m = scipy.sparse.coo_matrix(np.eye(3, dtype=np.float32))
            t = torch.sparse_coo_tensor(np.stack([m.row, m.col]), m.data, m.shape)
            out = (t @ torch.ones(3, 1)).sum().item()
            """,
        "an objective with torch's gradient": """
            import numpy as np
            from scipy.optimize import minimize
            def objective(v):
                p = torch.tensor(v, dtype=torch.float64, requires_grad=True)
                value = ((p - 1) ** 2).sum()
                value.backward()
                return value.item(), p.grad.cpu().numpy()
            out = minimize(objective, np.zeros(2), jac=True, method='L-BFGS-B', options={'maxiter': 3}).x.shape
            """,
    },
    "einops": {
        "patches of images": """
            from einops import rearrange, reduce, repeat
            images = torch.rand(2, 3, 8, 8)
            patches = rearrange(images, 'b c (h p) (w q) -> b (h w) (p q c)', p=4, q=4)
            out = reduce(repeat(patches, 'b n d -> b n d k', k=2), 'b n d k -> b d', 'mean').shape
            """,
        "layers in a model": """
            from einops.layers.torch import Rearrange, Reduce
            net = torch.nn.Sequential(
                Rearrange('b c h w -> b (h w) c'), torch.nn.Linear(3, 4), Reduce('b n c -> b c', 'max')
            ).to('DEVICE')
            out = net(torch.rand(2, 3, 4, 4)).sum().backward()
            """,
        "attention by einsum": """
            from einops import einsum, pack, unpack
            q, k = torch.rand(2, 4, 8), torch.rand(2, 5, 8)
            scores = einsum(q, k, 'b i d, b j d -> b i j').softmax(-1)
            packed, shapes = pack([q, k], 'b * d')
            out = scores.sum().item() > 0, [tuple(part.shape) for part in unpack(packed, shapes, 'b * d')]
            """,
    },
    "kornia": {
        "colours and filters": IMAGES + """
grey = kornia.color.rgb_to_grayscale(images)
out = kornia.filters.gaussian_blur2d(grey, (3, 3), (1., 1.)).shape, kornia.filters.sobel(grey).mean().isfinite().item()
""",
        "augmentations": IMAGES + """
augment = torch.nn.Sequential(kornia.augmentation.RandomHorizontalFlip(p=1.), kornia.augmentation.Normalize(.5, .2))
out = augment(images).shape
""",
        "a warp": IMAGES + """
matrix = kornia.geometry.get_rotation_matrix2d(torch.full((2, 2), 8.), torch.tensor([30., 60.]), torch.ones(2, 2))
out = kornia.geometry.warp_affine(images, matrix, (16, 16)).shape
""",
        "a loss between images": IMAGES + """
other = images.clone().requires_grad_()
kornia.losses.ssim_loss(images, other * .9, 5).backward()
out = other.grad.shape
""",
    },
    "gpytorch": {
        "an exact Gaussian process": """
            import gpytorch
            x = torch.linspace(0, 1, 12)
            y = torch.sin(6 * x)
            class GP(gpytorch.models.ExactGP):
                def __init__(self, x, y, likelihood):
                    super().__init__(x, y, likelihood)
                    self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()
                def forward(self, x):
                    return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))
            likelihood = gpytorch.likelihoods.GaussianLikelihood().to('DEVICE')
            model = GP(x, y, likelihood).to('DEVICE')
            marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
            optimizer = torch.optim.Adam(model.parameters(), lr=.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = -marginal(model(x), y)
                loss.backward()
                optimizer.step()
            out = loss.isfinite().item()
            """,
        "kernels": """
            import gpytorch
            kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5)).to('DEVICE')
            out = kernel(torch.rand(5, 2)).to_dense().shape
            """,
    },
    "torch_geometric": {
        "a graph network trains": GRAPH + """
graph = Data(x=nodes, edge_index=edges).to('DEVICE')
layer = torch_geometric.nn.GCNConv(5, 3).to('DEVICE')
loss = layer(graph.x, graph.edge_index).pow(2).mean()
loss.backward()
out = loss.item()
""",
        "batches of graphs": GRAPH + """
from torch_geometric.loader import DataLoader
with torch.device('cpu'):
    graphs = [Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]])) for _ in range(4)]
out = []
for batch in DataLoader(graphs, batch_size=2):
    batch = batch.to('DEVICE')
    out.append(torch_geometric.nn.global_mean_pool(batch.x, batch.batch).sum().item())
""",
        "attention over neighbours": GRAPH + """
net = torch_geometric.nn.GATConv(5, 2, heads=2).to('DEVICE')
out = net(nodes, edges).shape
""",
        "degrees and loops": GRAPH + """
from torch_geometric.utils import add_self_loops, degree, to_undirected
more, _ = add_self_loops(to_undirected(edges), num_nodes=4)
out = degree(more[0], 4).tolist()
""",
    },
    "torchdiffeq": {
        "an ordinary differential equation": """
            from torchdiffeq import odeint
            out = odeint(lambda t, y: -y, torch.ones(2), torch.linspace(0, 1, 4), method='rk4').shape
            """,
        "steps that adapt": """
            from torchdiffeq import odeint_adjoint
            class Field(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(2, 2)
                def forward(self, t, y):
                    return self.layer(y).tanh()
            field = Field().to('DEVICE')
            y = odeint_adjoint(field, torch.ones(2), torch.tensor([0., .1]), method='euler')
            y.sum().backward()
            out = field.layer.weight.grad.shape
            """,
    },
    "accelerate": {
        "a checkpoint of everything": "import accelerate, tempfile\n" + DATA + """
accelerator = accelerate.Accelerator(cpu=True)
with tempfile.TemporaryDirectory() as folder:
    accelerate.utils.save({'net': net.state_dict()}, folder + '/net.bin')
    state = torch.load(folder + '/net.bin')
    net.load_state_dict(state['net'])
out = sorted(state['net'])
""",
        "batches sent to a device": "import accelerate\n" + DATA + """
from accelerate.utils import send_to_device
out = []
for batch in loader:
    a, b = send_to_device(batch, 'DEVICE')
    out.append(net(a).sub(b).abs().mean().item())
""",
        "a model offloaded between layers": """
            import accelerate
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to('cpu')
            net = accelerate.cpu_offload(net, 'DEVICE')
            with torch.no_grad():
                out = net(torch.ones(1, 4)).shape
            """,
        "layers on two devices": """
            import accelerate
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            net = accelerate.dispatch_model(net, {'0': 'cpu', '1': 'DEVICE'}, main_device='DEVICE', force_hooks=True)
            with torch.no_grad():
                out = net(torch.ones(1, 4)).device.type
            """,
        "padding across processes and reductions": """
            import accelerate
            accelerator = accelerate.Accelerator(cpu=True)
            x = torch.ones(3, 2)
            out = accelerator.reduce(accelerator.pad_across_processes(x, dim=0)).sum().item()
            """,
    },
    "lightning": {
        "a trainer on the host's data": LIGHTNING + DATA + """
import tempfile
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    warnings.simplefilter('ignore')
    with torch.device('cpu'):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, limit_train_batches=2,
        )
        module = Net()
        module.training_step = lambda batch, index: module.layer(batch[0]).pow(2).mean()
        trainer.fit(module, loader)
out = trainer.global_step
""",
        "fabric": DATA + """
import lightning
fabric = lightning.Fabric(accelerator='cpu', devices=1)
for a, b in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(net(a.to('DEVICE')), b.to('DEVICE'))
    fabric.backward(loss)
    optimizer.step()
out = loss.item()
""",
        "seeds and a module's device": LIGHTNING + """
lightning.seed_everything(1, verbose=False)
module = Net().to('DEVICE')
out = module.layer.weight.device.type == module.device.type, module.layer.weight.sum().item()
""",
    },
    "torchmetrics": {
        "a collection over batches": """
            import torchmetrics
            metrics = torchmetrics.MetricCollection({
                'accuracy': torchmetrics.classification.BinaryAccuracy(),
                'recall': torchmetrics.classification.BinaryRecall(),
            }).to('DEVICE')
            for i in range(3):
                metrics.update(torch.full((4,), .3 * i), torch.tensor([0, 1, 0, 1]))
            out = {name: value.item() for name, value in metrics.compute().items()}
            """,
        "a running mean": """
            import torchmetrics
            mean = torchmetrics.MeanMetric().to('DEVICE')
            for i in range(4):
                mean(torch.tensor(float(i)))
            out = mean.compute().item()
            """,
        "image quality": """
            import torchmetrics
            metric = torchmetrics.image.PeakSignalNoiseRatio(data_range=1.).to('DEVICE')
            out = metric(torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)).shape
            """,
    },
    "torchvision": {
        "boxes kept by overlap": """
            import torchvision
            boxes = torch.tensor([[0., 0., 4., 4.], [0., 0., 4., 5.], [6., 6., 9., 9.]])
            kept = torchvision.ops.box_iou(boxes, boxes) > .5
            out = kept.sum().item(), torchvision.ops.box_area(boxes).tolist()
            """,
        "a loader of images": """
            import torchvision
            from torch.utils.data import DataLoader
            from torchvision.transforms.v2 import functional as F
            with torch.device('cpu'):
                data = torchvision.datasets.FakeData(6, (3, 16, 16), 3, transform=F.pil_to_tensor)
            net = torchvision.models.resnet18(num_classes=3).to('DEVICE').eval()
            out = []
            with torch.no_grad():
                for images, labels in DataLoader(data, batch_size=3):
                    out.append(net(images.to('DEVICE').float() / 255).argmax(1).shape)
            """,
        "features from the middle of a model": """
            import torchvision
            from torchvision.models.feature_extraction import create_feature_extractor
            net = create_feature_extractor(torchvision.models.resnet18().to('DEVICE').eval(), ['layer1', 'avgpool'])
            out = {name: tuple(value.shape) for name, value in net(torch.rand(1, 3, 32, 32)).items()}
            """,
        "only the last layer trains": """
            import torchvision
            net = torchvision.models.squeezenet1_1().to('DEVICE')
            for p in net.parameters():
                p.requires_grad_(False)
            net.classifier[1] = torch.nn.Conv2d(512, 2, 1)
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=.1)
            loss = net(torch.rand(2, 3, 64, 64)).pow(2).mean()
            loss.backward()
            optimizer.step()
            out = sum(p.grad is not None for p in net.parameters())
            """,
        "focal loss": """
            import torchvision
            x = torch.zeros(4, requires_grad=True)
            torchvision.ops.sigmoid_focal_loss(x, torch.tensor([0., 1., 0., 1.]), reduction='mean').backward()
            out = x.grad.tolist()
            """,
    },
    "timm": {
        "features at several scales": """
            import timm
            net = timm.create_model('resnet18', features_only=True).to('DEVICE').eval()
            with torch.no_grad():
                out = [tuple(each.shape) for each in net(torch.rand(1, 3, 64, 64))]
            """,
        "a frozen body with a new head": """
            import timm
            net = timm.create_model('lcnet_035', num_classes=5).to('DEVICE')
            for name, p in net.named_parameters():
                p.requires_grad_('classifier' in name)
            net.reset_classifier(3)
            net.to('DEVICE')(torch.rand(2, 3, 64, 64)).sum().backward()
            out = net.get_classifier().weight.grad.shape
            """,
        "clipped adaptively": """
            import timm.utils
            net = torch.nn.Linear(4, 4).to('DEVICE')
            net(torch.ones(1, 4)).sum().backward()
            timm.utils.adaptive_clip_grad(net.parameters(), .01)
            out = net.weight.grad.abs().max().item() < 1
            """,
    },
    "transformers": {
        "a classifier trains with a schedule": """
            import transformers
            config = transformers.BertConfig(
                vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37,
                num_labels=3,
            )
            net = transformers.BertForSequenceClassification(config).to('DEVICE')
            optimizer = torch.optim.AdamW(net.parameters())
            schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 4)
            ids = torch.arange(16).reshape(2, 8)
            for _ in range(2):
                loss = net(ids, labels=torch.tensor([0, 2])).loss
                loss.backward()
                optimizer.step(), schedule.step(), optimizer.zero_grad()
            out = loss.item() > 0
            """,
        "a cache over steps by hand": LANGUAGE + """
past = None
with torch.no_grad():
    for _ in range(3):
        given = ids if past is None else ids[:, -1:]
        answer = net(given, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        ids = torch.cat([ids, answer.logits[:, -1:].argmax(-1)], 1)
out = ids.shape
""",
        "perplexity in windows": LANGUAGE + """
total, n = 0., 0
with torch.no_grad():
    for start in range(0, 8, 4):
        part = ids[:, start:start + 4]
        total, n = total + net(part, labels=part).loss.item() * part.numel(), n + part.numel()
out = total / n > 0
""",
        "checkpointing and half precision": LANGUAGE + """
net.gradient_checkpointing_enable()
net.train()
net.bfloat16()
net(ids, labels=ids).loss.backward()
out = net.lm_head.weight.grad.dtype == torch.bfloat16
""",
        "saved and loaded from a folder": LANGUAGE + """
import tempfile
with tempfile.TemporaryDirectory() as folder:
    net.save_pretrained(folder)
    again = transformers.GPT2LMHeadModel.from_pretrained(folder).to('DEVICE')
out = torch.equal(net.lm_head.weight, again.lm_head.weight)
""",
        "attention maps": LANGUAGE + """
net = transformers.GPT2LMHeadModel(config, ).to('DEVICE').eval()
net.set_attn_implementation('eager')
with torch.no_grad():
    maps = net(ids, output_attentions=True).attentions
out = torch.stack(maps).mean((0, 1, 2)).shape
""",
        "embeddings grown": LANGUAGE + """
net.resize_token_embeddings(105, mean_resizing=False)
out = net.get_input_embeddings().weight.shape, net(ids).logits.shape
""",
    },
    "peft": {
        "two adapters switched": LANGUAGE + """
import peft
def lora(rank):
    return peft.LoraConfig(r=rank, target_modules=['c_attn'], fan_in_fan_out=True)
net = peft.get_peft_model(net, lora(2), 'one')
net.add_adapter('two', lora(4))
net.to('DEVICE').set_adapter('two')
net(input_ids=ids, labels=ids).loss.backward()
out = sum(p.grad is not None for p in net.parameters())
""",
        "an adapter saved and loaded": LANGUAGE + """
import peft
net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=['c_attn'], fan_in_fan_out=True))
state = peft.get_peft_model_state_dict(net)
peft.set_peft_model_state_dict(net, {name: value.cpu() for name, value in state.items()})
with net.disable_adapter():
    out = net.to('DEVICE')(input_ids=ids).logits.shape
""",
    },
    "diffusers": {
        "weights averaged": UNET + """
from diffusers.training_utils import EMAModel
average = EMAModel(net.parameters(), decay=.9)
average.to('DEVICE')
average.step(net.parameters())
average.copy_to(net.parameters())
out = average.optimization_step
""",
        "a pipeline": UNET + """
with torch.device('cpu'):
    pipeline = diffusers.DDPMPipeline(net, diffusers.DDPMScheduler(20)).to('DEVICE')
    pipeline.set_progress_bar_config(disable=True)
    out = pipeline(num_inference_steps=2, output_type='np', generator=torch.Generator().manual_seed(0)).images.shape
""",
    },
}  # fmt: skip
