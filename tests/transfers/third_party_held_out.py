"""Cells of libraries that no other cell uses: none of them was run while `%%ondevice` and `%devices` were written.

By library, as its package is called, and by what the cell does. `EDITS` is what somebody does to a cell who follows the
advice about it: by the cell's name, and by a phrase of the advice, what is replaced by what.
"""

from __future__ import annotations

POINTS = """
from torch.utils.data import DataLoader, TensorDataset
with torch.device('cpu'):
    x = torch.linspace(-1, 1, 240).reshape(60, 4)
    y = (x.sum(1) > 0).long()
"""
WORDS = """
import transformers
config = transformers.BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
)
"""

HELD_OUT = {
    "botorch": {
        "a surrogate's best candidate": """
            import warnings
            from botorch.acquisition import LogExpectedImprovement
            from botorch.fit import fit_gpytorch_mll
            from botorch.models import SingleTaskGP
            from botorch.optim import optimize_acqf
            from gpytorch.mlls import ExactMarginalLogLikelihood
            X = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
            Y = -(X - .4) ** 2
            gp = SingleTaskGP(X, Y)
            mll = ExactMarginalLogLikelihood(gp.likelihood, gp)
            fit_gpytorch_mll(mll, optimizer_kwargs={'options': {'maxiter': 4}})
            bounds = torch.tensor([[0.], [1.]], dtype=torch.float64)
            best, value = optimize_acqf(
                LogExpectedImprovement(gp, Y.max()), bounds, q=1, num_restarts=2, raw_samples=4, options={'maxiter': 3},
            )
            out = best.shape
            """,
        "a Sobol design scored by Thompson samples": """
            from botorch.models import SingleTaskGP
            from botorch.utils.sampling import draw_sobol_samples
            bounds = torch.tensor([[0., 0.], [1., 1.]], dtype=torch.float64)
            X = draw_sobol_samples(bounds, n=6, q=1, seed=0).squeeze(1)
            gp = SingleTaskGP(X, X.sum(1, keepdim=True))
            with torch.no_grad():
                post = gp.posterior(X[:2])
            out = post.mean.shape, post.rsample(torch.Size([3])).shape
            """,
    },
    "pyro-ppl": {
        "variational inference": """
            import pyro, pyro.distributions as dist
            from pyro.infer import SVI, Trace_ELBO
            pyro.clear_param_store()
            data = torch.tensor([1., 1., 0., 1.])
            def model(data):
                f = pyro.sample('f', dist.Beta(torch.tensor(10.), torch.tensor(10.)))
                with pyro.plate('data', len(data)):
                    pyro.sample('obs', dist.Bernoulli(f), obs=data)
            def guide(data):
                a = pyro.param('a', torch.tensor(15.), constraint=dist.constraints.positive)
                b = pyro.param('b', torch.tensor(15.), constraint=dist.constraints.positive)
                pyro.sample('f', dist.Beta(a, b))
            svi = SVI(model, guide, pyro.optim.Adam({'lr': .01}), Trace_ELBO())
            losses = [svi.step(data) for _ in range(5)]
            out = len(losses), pyro.param('a').item() > 0
            """,
        "a chain of Hamiltonian steps": """
            import pyro, pyro.distributions as dist
            from pyro.infer import MCMC, NUTS
            def model():
                return pyro.sample('x', dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))
            mcmc = MCMC(NUTS(model, max_tree_depth=2), num_samples=4, warmup_steps=2, disable_progbar=True)
            mcmc.run()
            out = mcmc.get_samples()['x'].shape
            """,
    },
    "e3nn": {
        "an equivariant layer": """
            from e3nn import o3
            layer = o3.Linear('2x0e + 1x1o', '1x0e + 2x1o').to('DEVICE')
            out = layer(torch.ones(3, 5)).shape
            """,
        "spherical harmonics of a cloud of points": """
            from e3nn import o3
            points = torch.tensor([[1., 0., 0.], [0., 2., 0.]])
            harmonics = o3.spherical_harmonics([0, 1, 2], points, normalize=True)
            product = o3.FullyConnectedTensorProduct('1x0e + 1x1o + 1x2e', '1x0e', '1x1o').to('DEVICE')
            value = product(harmonics, torch.ones(2, 1))
            value.pow(2).sum().backward()
            out = product.weight.grad.shape, value.shape
            """,
    },
    "torchsde": {
        "a path by Euler's method": """
            import torchsde
            class Walk(torch.nn.Module):
                noise_type, sde_type = 'diagonal', 'ito'
                def __init__(self):
                    super().__init__()
                    self.drift = torch.nn.Linear(2, 2)
                def f(self, t, y):
                    return self.drift(y)
                def g(self, t, y):
                    return .1 * torch.ones_like(y)
            walk = Walk().to('DEVICE')
            path = torchsde.sdeint(walk, torch.zeros(3, 2), torch.linspace(0, .2, 3), method='euler', dt=.1)
            path[-1].sum().backward()
            out = path.shape, walk.drift.weight.grad.shape
            """,
    },
    "captum": {
        "integrated gradients": """
            from captum.attr import IntegratedGradients
            net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).to('DEVICE')
            given = torch.ones(2, 4, requires_grad=True)
            said, delta = IntegratedGradients(net).attribute(given, target=1, n_steps=8, return_convergence_delta=True)
            out = said.shape, bool(delta.abs().max() < 1)
            """,
        "occlusion, one patch after the other": """
            from captum.attr import Occlusion
            net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)).to('DEVICE')
            image = torch.linspace(0, 1, 64, device='cpu').reshape(1, 1, 8, 8)
            said = Occlusion(net).attribute(image.to('DEVICE'), target=0, sliding_window_shapes=(1, 4, 4), strides=4)
            heat = said.squeeze().cpu().numpy()
            out = heat.shape
            """,
        "neurons of a layer": """
            from captum.attr import LayerActivation, LayerConductance
            net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to('DEVICE')
            given = torch.eye(3)
            seen = LayerActivation(net, net[1]).attribute(given)
            flows = LayerConductance(net, net[0]).attribute(given, target=0, n_steps=4)
            out = seen.shape, flows.shape
            """,
    },
    "pytorch-ignite": {
        "an engine with a metric": POINTS
        + """
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
net = torch.nn.Linear(4, 2).to('DEVICE')
loss = torch.nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(x, y), batch_size=20)
trainer = create_supervised_trainer(net, torch.optim.SGD(net.parameters(), lr=.1), loss, device='DEVICE')
evaluator = create_supervised_evaluator(net, {'acc': Accuracy(), 'loss': Loss(loss)}, device='DEVICE')
seen = []
@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run(loader)
    seen.append(evaluator.state.metrics['acc'])
trainer.run(loader, max_epochs=2)
out = seen
""",
        "a running average of the loss": POINTS
        + """
from ignite.engine import Engine
from ignite.metrics import RunningAverage
net = torch.nn.Linear(4, 2).to('DEVICE')
def step(engine, batch):
    a, b = (each.to('DEVICE') for each in batch)
    return torch.nn.functional.cross_entropy(net(a), b).item()
trainer = Engine(step)
RunningAverage(output_transform=lambda value: value).attach(trainer, 'average')
state = trainer.run(DataLoader(TensorDataset(x, y), batch_size=10))
out = state.metrics['average']
""",
    },
    "x-transformers": {
        "a decoder generates": """
            from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
            net = TransformerWrapper(num_tokens=20, max_seq_len=32, attn_layers=Decoder(dim=16, depth=1, heads=2)).to('DEVICE')
            net = AutoregressiveWrapper(net)
            ids = torch.arange(8)[None]
            net(ids).backward()
            out = net.generate(ids[:, :2], 3, temperature=0.).shape
            """,
        "rotary positions and a memory": """
            from x_transformers import Encoder, TransformerWrapper
            net = TransformerWrapper(
                num_tokens=20, max_seq_len=32, num_memory_tokens=2, attn_layers=Encoder(dim=16, depth=1, heads=2, rotary_pos_emb=True),
            ).to('DEVICE')
            mask = torch.ones(2, 6, dtype=torch.bool)
            mask[0, 4:] = False
            out = net(torch.ones(2, 6, dtype=torch.long), mask=mask, return_embeddings=True).shape
            """,
    },
    "vector-quantize-pytorch": {
        "a codebook learns": """
            from vector_quantize_pytorch import VectorQuantize
            vq = VectorQuantize(dim=8, codebook_size=16, decay=.8).to('DEVICE')
            for _ in range(3):
                quantized, indices, loss = vq(torch.randn(2, 10, 8))
            out = quantized.shape, indices.shape
            """,
        "residual and finite scalar codes": """
            from vector_quantize_pytorch import FSQ, ResidualVQ
            codes = ResidualVQ(dim=8, codebook_size=16, num_quantizers=2).to('DEVICE')
            quantized, indices, losses = codes(torch.randn(1, 6, 8))
            grid = FSQ([5, 5, 5]).to('DEVICE')
            again, places = grid(torch.linspace(-1, 1, 12).reshape(1, 4, 3))
            out = indices.shape, places.tolist()
            """,
    },
    "rotary-embedding-torch": {
        "queries turned": """
            from rotary_embedding_torch import RotaryEmbedding
            turn = RotaryEmbedding(dim=8).to('DEVICE')
            q = turn.rotate_queries_or_keys(torch.ones(1, 2, 6, 8))
            k = turn.rotate_queries_or_keys(torch.ones(1, 2, 6, 8))
            out = (q @ k.transpose(-1, -2)).diagonal(dim1=-2, dim2=-1).sum().item()
            """,
    },
    "lion-pytorch": {
        "Lion on a small network": """
            from lion_pytorch import Lion
            net = torch.nn.Linear(4, 2).to('DEVICE')
            opt = Lion(net.parameters(), lr=1e-3, weight_decay=1e-2)
            history = []
            for _ in range(4):
                opt.zero_grad()
                loss = net(torch.ones(3, 4)).pow(2).mean()
                loss.backward()
                opt.step()
                history.append(loss.item())
            out = history
            """,
    },
    "torch-optimizer": {
        "several optimizers race": """
            import torch_optimizer
            out = {}
            for name in ('Yogi', 'NovoGrad', 'DiffGrad', 'QHAdam'):
                torch.manual_seed(0)
                net = torch.nn.Linear(4, 2).to('DEVICE')
                opt = getattr(torch_optimizer, name)(net.parameters(), lr=.01)
                for _ in range(3):
                    opt.zero_grad()
                    loss = net(torch.ones(3, 4)).pow(2).mean()
                    loss.backward()
                    opt.step()
                out[name] = loss.item()
            """,
    },
    "schedulefree": {
        "no schedule": POINTS
        + """
import schedulefree
net = torch.nn.Linear(4, 2).to('DEVICE')
opt = schedulefree.AdamWScheduleFree(net.parameters(), lr=.01, warmup_steps=2)
opt.train()
for a, b in DataLoader(TensorDataset(x, y), batch_size=15):
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(a.to('DEVICE')), b.to('DEVICE'))
    loss.backward()
    opt.step()
opt.eval()
with torch.no_grad():
    out = (net(x.to('DEVICE')).argmax(1).cpu() == y).float().mean().item()
""",
    },
    "prodigyopt": {
        "a step size of its own": """
            from prodigyopt import Prodigy
            net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1)).to('DEVICE')
            opt = Prodigy(net.parameters(), lr=1., safeguard_warmup=True)
            for _ in range(3):
                opt.zero_grad()
                loss = net(torch.eye(3)).pow(2).sum()
                loss.backward()
                opt.step()
            out = loss.item(), opt.param_groups[0]['d'] > 0
            """,
    },
    "ema-pytorch": {
        "an average of weights": """
            from ema_pytorch import EMA
            net = torch.nn.Linear(4, 4).to('DEVICE')
            ema = EMA(net, beta=.9, update_after_step=0, update_every=1)
            for _ in range(3):
                with torch.no_grad():
                    net.weight.add_(.1)
                ema.update()
            out = ema(torch.ones(1, 4)).shape, int(ema.step)
            """,
    },
    "torchinfo": {
        "a summary of a model": """
            import torchinfo
            net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
            found = torchinfo.summary(net.to('DEVICE'), input_size=(2, 1, 8, 8), verbose=0, device='DEVICE')
            out = found.total_params, found.total_output_bytes
            """,
    },
    "entmax": {
        "sparse attention": """
            from entmax import entmax15, sparsemax
            scores = torch.tensor([[1., 2., 3.], [0., 0., 5.]], requires_grad=True)
            p = sparsemax(scores, dim=-1)
            p[0, 0].backward()
            out = p.tolist(), entmax15(scores.detach(), dim=-1).sum().item()
            """,
    },
    "opacus": {
        "private gradients": POINTS
        + """
import warnings
from opacus import PrivacyEngine
warnings.simplefilter('ignore')
net = torch.nn.Linear(4, 2).to('DEVICE')
opt = torch.optim.SGD(net.parameters(), lr=.1)
with torch.device('cpu'):
    engine = PrivacyEngine()
    net, opt, loader = engine.make_private(
        module=net, optimizer=opt, data_loader=DataLoader(TensorDataset(x, y), batch_size=20), noise_multiplier=1., max_grad_norm=1.,
    )
    for a, b in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(net(a.to('DEVICE')), b.to('DEVICE')).backward()
        opt.step()
out = engine.get_epsilon(1e-5) > 0
""",
    },
    "sentence-transformers": {
        "sentences by mean pooling": WORDS
        + """
import tempfile
from sentence_transformers import SentenceTransformer, models, util
with tempfile.TemporaryDirectory() as folder:
    open(folder + '/vocab.txt', 'w').write('\\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *'abcdefgh']))
    transformers.BertTokenizer(folder + '/vocab.txt').save_pretrained(folder)
    transformers.BertModel(config).to('cpu').save_pretrained(folder)
    with torch.device('cpu'):
        words = models.Transformer(folder)
    net = SentenceTransformer(modules=[words, models.Pooling(16)], device='DEVICE')
    vectors = net.encode(['a b c', 'd e', 'f g h'], batch_size=2, convert_to_tensor=True, show_progress_bar=False)
out = util.cos_sim(vectors, vectors).shape
""",
    },
    "webdataset": {
        "samples from a shard": """
            import io, tempfile
            import webdataset
            with tempfile.TemporaryDirectory() as folder:
                with webdataset.TarWriter(folder + '/a.tar') as shard:
                    for i in range(6):
                        shard.write({'__key__': f'{i:03}', 'x.pyd': [float(i)] * 3, 'cls': i % 2})
                data = webdataset.WebDataset(folder + '/a.tar', shardshuffle=False).decode().to_tuple('x.pyd', 'cls')
                net = torch.nn.Linear(3, 2).to('DEVICE')
                out = []
                for x, label in data:
                    out.append(net(torch.tensor(x)).argmax().item() in (0, 1))
            """,
    },
    "zuko": {
        "a flow is fitted": """
            import zuko
            flow = zuko.flows.NSF(2, context=1, transforms=1, hidden_features=[8]).to('DEVICE')
            opt = torch.optim.Adam(flow.parameters())
            for _ in range(2):
                loss = -flow(torch.zeros(4, 1)).log_prob(torch.randn(4, 2)).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
            out = flow(torch.zeros(1)).sample((3,)).shape
            """,
    },
    "normflows": {
        "affine couplings": """
            import normflows
            base = normflows.distributions.base.DiagGaussian(2)
            steps = []
            for _ in range(2):
                steps += [normflows.flows.AffineCouplingBlock(normflows.nets.MLP([1, 8, 2])), normflows.flows.Permute(2)]
            flow = normflows.NormalizingFlow(base, steps).to('DEVICE')
            loss = flow.forward_kld(torch.randn(8, 2))
            loss.backward()
            out = bool(torch.isfinite(loss)), flow.sample(3)[0].shape
            """,
    },
    "geotorch": {
        "an orthogonal weight": """
            import geotorch
            net = torch.nn.Linear(4, 4).to('DEVICE')
            geotorch.orthogonal(net, 'weight')
            opt = torch.optim.SGD(net.parameters(), lr=.1)
            for _ in range(2):
                opt.zero_grad()
                net(torch.ones(1, 4)).sum().backward()
                opt.step()
            out = bool((net.weight @ net.weight.T - torch.eye(4)).abs().max() < 1e-4)
            """,
    },
    "pytorch-metric-learning": {
        "triplets mined": """
            from pytorch_metric_learning import distances, losses, miners
            net = torch.nn.Linear(4, 3).to('DEVICE')
            embeddings = net(torch.linspace(-1, 1, 32).reshape(8, 4))
            labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
            mined = miners.MultiSimilarityMiner()(embeddings, labels)
            loss = losses.TripletMarginLoss(distance=distances.CosineSimilarity())(embeddings, labels, mined)
            loss.backward()
            out = loss.item()
            """,
        "proxies and a memory of the last batches": """
            from pytorch_metric_learning import losses
            loss_of = losses.ProxyAnchorLoss(num_classes=3, embedding_size=4).to('DEVICE')
            memory = losses.CrossBatchMemory(losses.ContrastiveLoss(), embedding_size=4, memory_size=8)
            x, labels = torch.eye(4), torch.tensor([0, 1, 2, 0])
            loss = loss_of(x, labels) + memory(x, labels) + memory(x.roll(1), labels)
            loss.backward()
            out = loss_of.proxies.grad.shape
            """,
    },
    "pytorch-msssim": {
        "structural similarity": """
            from pytorch_msssim import SSIM, ssim
            a, b = torch.linspace(0, 1, 768).reshape(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)
            measure = SSIM(data_range=1., channel=3).to('DEVICE')
            out = measure(a, a).item(), ssim(a, b, data_range=1.).item()
            """,
    },
    "piq": {
        "quality of images, one after the other": """
            import piq
            images = [torch.linspace(0, 1, 3 * 32 * 32, device='cpu').reshape(1, 3, 32, 32) * (i / 8) for i in range(4)]
            clean = images[-1].to('DEVICE')
            out = []
            for each in images:
                out.append(piq.psnr(each.to('DEVICE'), clean).item() + piq.gmsd(each.to('DEVICE'), clean).item())
            """,
    },
    "torchcde": {
        "a spline through observations": """
            import torchcde
            t = torch.linspace(0, 1, 6)
            x = torch.stack([t, t.sin(), t.cos()], -1)[None]
            path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x, t), t)
            class Field(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = torch.nn.Linear(2, 6)
                def forward(self, t, z):
                    return self.layer(z).view(*z.shape[:-1], 2, 3)
            field = Field().to('DEVICE')
            z = torchcde.cdeint(X=path, func=field, z0=torch.zeros(1, 2), t=t[[0, -1]], method='euler', adjoint=False)
            z.sum().backward()
            out = z.shape, field.layer.weight.grad.shape
            """,
    },
    "snntorch": {
        "spikes over time": """
            import snntorch
            from snntorch import surrogate, utils
            neuron = snntorch.Leaky(beta=.9, spike_grad=surrogate.fast_sigmoid())
            net = torch.nn.Linear(4, 2).to('DEVICE')
            membrane, spikes = neuron.init_leaky(), []
            for step in range(5):
                spike, membrane = neuron(net(torch.ones(1, 4) * step), membrane)
                spikes.append(spike)
            torch.stack(spikes).sum().backward()
            out = torch.stack(spikes).shape, net.weight.grad.shape
            """,
    },
    "stable-baselines3": {
        "an agent learns": """
            import gymnasium
            from stable_baselines3 import PPO
            env = gymnasium.make('CartPole-v1')
            agent = PPO('MlpPolicy', env, n_steps=16, batch_size=8, n_epochs=1, device='DEVICE', seed=0, policy_kwargs={'net_arch': [8]})
            with torch.device('cpu'):
                agent.learn(16)
            out = agent.num_timesteps
            """,
        "off-policy, with a replay buffer": """
            import gymnasium
            from stable_baselines3 import DQN
            agent = DQN(
                'MlpPolicy', gymnasium.make('CartPole-v1'), learning_starts=8, batch_size=4, buffer_size=50, train_freq=4,
                device='DEVICE', seed=0, policy_kwargs={'net_arch': [8]},
            )
            agent.learn(24)
            out = agent.replay_buffer.size()
            """,
    },
    "gymnasium": {
        "REINFORCE by hand": """
            import gymnasium
            env = gymnasium.make('CartPole-v1')
            policy = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to('DEVICE')
            opt = torch.optim.Adam(policy.parameters(), lr=.01)
            state, _ = env.reset(seed=0)
            kept, rewards, steps = [], [], 0
            while steps < 130:
                scores = policy(torch.as_tensor(state))
                choice = torch.distributions.Categorical(logits=scores)
                action = choice.sample()
                kept.append(choice.log_prob(action))
                state, reward, done, cut, _ = env.step(int(action))
                rewards.append(reward)
                steps += 1
                if done or cut:
                    state, _ = env.reset()
            loss = -(torch.stack(kept) * torch.tensor(rewards)).mean()
            loss.backward()
            opt.step()
            out = len(kept)
            """,
    },
    "tensordict": {
        "a batch of a dictionary": """
            from tensordict import TensorDict
            td = TensorDict({'a': torch.ones(4, 3), 'b': {'c': torch.zeros(4, 2)}}, batch_size=[4])
            host = td.to('cpu')
            back = host.to('DEVICE')
            out = back['b', 'c'].shape, float(back[1:3]['a'].sum()), str(td['a'].device) == str(back['a'].device)
            """,
        "modules that read and write keys": """
            from tensordict import TensorDict
            from tensordict.nn import TensorDictModule, TensorDictSequential
            first = TensorDictModule(torch.nn.Linear(3, 4), in_keys=['x'], out_keys=['h'])
            second = TensorDictModule(torch.nn.Linear(4, 1), in_keys=['h'], out_keys=['y'])
            both = TensorDictSequential(first, second).to('DEVICE')
            td = both(TensorDict({'x': torch.ones(5, 3)}, batch_size=[5]))
            td['y'].sum().backward()
            out = sorted(td.keys())
            """,
        "memory-mapped on disk": """
            import tempfile
            from tensordict import TensorDict
            with tempfile.TemporaryDirectory() as folder, torch.device('cpu'):
                saved = TensorDict({'x': torch.arange(12.).reshape(6, 2)}, batch_size=[6]).memmap(folder)
                out = []
                for part in saved.split(2):
                    out.append(part.to('DEVICE')['x'].sum().item())
            """,
    },
    "denoising-diffusion-pytorch": {
        "a step of diffusion": """
            from denoising_diffusion_pytorch import GaussianDiffusion, Unet
            net = Unet(dim=8, dim_mults=(1, 2), channels=1, flash_attn=False).to('DEVICE')
            diffusion = GaussianDiffusion(net, image_size=8, timesteps=4).to('DEVICE')
            loss = diffusion(torch.rand(2, 1, 8, 8))
            loss.backward()
            out = diffusion.sample(batch_size=1).shape
            """,
    },
    "torchode": {
        "solved in parallel": """
            import torchode
            term = torchode.ODETerm(lambda t, y: -y)
            method = torchode.Dopri5(term=term)
            control = torchode.IntegralController(atol=1e-4, rtol=1e-3, term=term)
            solver = torchode.AutoDiffAdjoint(method, control).to('DEVICE')
            t = torch.linspace(0, 1, 4).repeat(2, 1)
            out = solver.solve(torchode.InitialValueProblem(y0=torch.ones(2, 1), t_eval=t)).ys.shape
            """,
    },
    "skorch": {
        "a classifier fits": """
            import numpy as np
            from skorch import NeuralNetClassifier
            X = np.linspace(-1, 1, 480, dtype=np.float32).reshape(120, 4)
            y = (X.sum(1) > 0).astype(np.int64)
            net = NeuralNetClassifier(torch.nn.Linear, module__in_features=4, module__out_features=2, criterion=torch.nn.CrossEntropyLoss,
                max_epochs=1, batch_size=40, device='DEVICE', verbose=0, train_split=None)
            net.fit(X, y)
            out = net.predict(X).shape
            """,
    },
    "safetensors": {
        "weights saved and loaded by parts": """
            import tempfile
            from safetensors import safe_open
            from safetensors.torch import load_model, save_model
            net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to('DEVICE')
            with tempfile.TemporaryDirectory() as folder:
                save_model(net, folder + '/net.safetensors')
                load_model(net, folder + '/net.safetensors')
                with safe_open(folder + '/net.safetensors', 'pt') as file:
                    sizes = {name: file.get_tensor(name).to('DEVICE').sum().item() for name in file.keys()}
            out = sizes
            """,
    },
    "segmentation-models-pytorch": {
        "masks and a Dice loss": """
            import segmentation_models_pytorch as smp
            net = smp.Unet('resnet18', encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=1).to('DEVICE')
            masks = torch.zeros(2, 1, 32, 32)
            masks[:, :, :16] = 1
            loss = smp.losses.DiceLoss('binary')(net(torch.rand(2, 3, 32, 32)), masks)
            loss.backward()
            tp, fp, fn, tn = smp.metrics.get_stats(masks.long(), masks.long(), mode='binary')
            out = smp.metrics.iou_score(tp, fp, fn, tn, reduction='micro').item()
            """,
    },
    "open-clip-torch": {
        "images beside texts": """
            import open_clip
            from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
            net = CLIP(
                16, CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16),
                CLIPTextCfg(context_length=8, vocab_size=50, width=32, heads=2, layers=1),
            ).to('DEVICE')
            images, texts, scale = net(torch.rand(3, 3, 16, 16), torch.arange(24).reshape(3, 8))
            loss = open_clip.ClipLoss()(images, texts, scale)
            loss.backward()
            out = net.logit_scale.grad.shape
            """,
    },
    "lightly": {
        "two views and a contrast": """
            from lightly.loss import NTXentLoss
            from lightly.models.modules import SimCLRProjectionHead
            from lightly.models.utils import update_momentum
            import copy
            body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8)).to('DEVICE')
            head = SimCLRProjectionHead(8, 8, 4).to('DEVICE')
            slow = copy.deepcopy(body)
            for i in range(2):
                a, b = torch.rand(4, 3, 4, 4), torch.rand(4, 3, 4, 4)
                loss = NTXentLoss(memory_bank_size=(8, 4)).to('DEVICE')(head(body(a)), head(body(b)))
                loss.backward()
                update_momentum(body, slow, m=.9)
            out = bool(loss.isfinite())
            """,
    },
    "monai": {
        "a volume in sliding windows": """
            from monai.inferers import sliding_window_inference
            from monai.losses import DiceCELoss
            from monai.metrics import DiceMetric
            from monai.networks.nets import UNet
            net = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)).to('DEVICE')
            volume, labels = torch.rand(1, 1, 16, 16, 16), torch.zeros(1, 1, 16, 16, 16)
            loss = DiceCELoss(to_onehot_y=True, softmax=True)(net(volume), labels)
            loss.backward()
            with torch.no_grad():
                whole = sliding_window_inference(volume, (8, 8, 8), 4, net)
            measure = DiceMetric(include_background=True)
            measure(whole.argmax(1, keepdim=True), labels)
            out = whole.shape, measure.aggregate().shape
            """,
        "a dictionary through transforms": """
            import numpy as np
            from monai.data import CacheDataset, DataLoader
            from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, ScaleIntensityd, ToTensord
            with torch.device('cpu'):
                steps = Compose([
                    EnsureChannelFirstd(['image'], channel_dim='no_channel'), ScaleIntensityd(['image']),
                    RandFlipd(['image'], prob=1., spatial_axis=0), ToTensord(['image', 'label']),
                ])
                rows = [{'image': np.full((4, 4), i, dtype=np.float32), 'label': i % 2} for i in range(6)]
                batches = list(DataLoader(CacheDataset(rows, steps, progress=False), batch_size=3))
            net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).to('DEVICE')
            out = []
            for batch in batches:
                out.append(net(batch['image'].as_tensor().to('DEVICE')).argmax(1).shape)
            """,
    },
    "torchio": {
        "subjects and patches": """
            import torchio
            with torch.device('cpu'):
                subject = torchio.Subject(scan=torchio.ScalarImage(tensor=torch.rand(1, 12, 12, 12)), age=40)
                changed = torchio.Compose([torchio.RandomFlip(axes=0, flip_probability=1), torchio.ZNormalization()])(subject)
                patches = torchio.GridSampler(changed, 6)
            net = torch.nn.Conv3d(1, 2, 3, padding=1).to('DEVICE')
            out = []
            with torch.no_grad():
                for patch in patches:
                    out.append(tuple(net(patch['scan'][torchio.DATA][None].to('DEVICE')).shape))
            """,
    },
    "fastai": {
        "a tabular learner": """
            import pandas as pd
            from fastai.tabular.all import Categorify, MSELossFlat, Normalize, TabularDataLoaders, tabular_learner
            frame = pd.DataFrame({'a': [float(i) for i in range(40)], 'b': list('xy') * 20, 'y': [i / 40 for i in range(40)]})
            with torch.device('cpu'):
                data = TabularDataLoaders.from_df(
                    frame, cat_names=['b'], cont_names=['a'], y_names='y', procs=[Categorify, Normalize], bs=10, device=torch.device('DEVICE'),
                    valid_idx=list(range(30, 40)),
                )
                learn = tabular_learner(data, layers=[8], loss_func=MSELossFlat())
                with learn.no_bar(), learn.no_logging():
                    learn.fit(1)
            out = bool(learn.recorder.values[-1][0] > 0)
            """,
    },
    "neuraloperator": {
        "an operator of fields": """
            from neuralop.models import FNO
            net = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=1).to('DEVICE')
            y = net(torch.linspace(0, 1, 64).reshape(1, 1, 8, 8))
            y.pow(2).mean().backward()
            out = y.shape
            """,
    },
    "nnsight": {
        "a trace of a module's insides": """
            from nnsight import NNsight
            net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).to('DEVICE')
            watched = NNsight(net)
            with watched.trace(torch.ones(2, 4)):
                hidden = watched[1].output.save()
                watched[1].output[:] = 0
                answer = watched[2].output.save()
            out = hidden.shape, answer.shape
            """,
    },
    "torchrl": {
        "advantages from a rollout": """
            from tensordict import TensorDict
            from tensordict.nn import TensorDictModule
            from torchrl.data import LazyTensorStorage, ReplayBuffer
            from torchrl.objectives.value import GAE
            value = TensorDictModule(torch.nn.Linear(3, 1).to('DEVICE'), in_keys=['observation'], out_keys=['state_value'])
            steps = TensorDict({
                'observation': torch.rand(1, 6, 3), 'next': TensorDict({
                    'observation': torch.rand(1, 6, 3), 'reward': torch.ones(1, 6, 1), 'done': torch.zeros(1, 6, 1, dtype=torch.bool),
                    'terminated': torch.zeros(1, 6, 1, dtype=torch.bool),
                }, [1, 6]),
            }, [1, 6])
            steps = GAE(gamma=.99, lmbda=.95, value_network=value)(steps)
            buffer = ReplayBuffer(storage=LazyTensorStorage(6, device='DEVICE'), batch_size=3)
            buffer.extend(steps.reshape(-1))
            out = buffer.sample()['advantage'].shape
            """,
    },
    "higher": {
        "an inner loop that is differentiated": """
            import higher
            net = torch.nn.Linear(3, 1).to('DEVICE')
            opt = torch.optim.SGD(net.parameters(), lr=.1)
            with higher.innerloop_ctx(net, opt, copy_initial_weights=False) as (fast, inner):
                for _ in range(2):
                    inner.step(fast(torch.ones(2, 3)).pow(2).mean())
                fast(torch.zeros(1, 3)).sum().backward()
            out = net.weight.grad.shape
            """,
    },
    "pytorch-tabnet": {
        "a table with attention": """
            import numpy as np
            from pytorch_tabnet.tab_network import TabNet
            net = TabNet(6, 2, n_d=4, n_a=4, n_steps=2, group_attention_matrix=torch.eye(6)).to('DEVICE')
            x = torch.from_numpy(np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6))
            scores, sparsity = net(x.to('DEVICE'))
            (torch.nn.functional.cross_entropy(scores, torch.zeros(8, dtype=torch.long)) - 1e-3 * sparsity).backward()
            out = scores.shape
            """,
    },
    "torch-pruning": {
        "channels removed": """
            import torch_pruning
            net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 3)).to('DEVICE')
            given = torch.rand(1, 3, 16, 16)
            graph = torch_pruning.DependencyGraph().build_dependency(net, given)
            graph.get_pruning_group(net[0], torch_pruning.prune_conv_out_channels, idxs=[1, 3]).prune()
            out = net[0].out_channels, net(given).shape
            """,
    },
    "lpips": {
        "a distance by a random network": """
            import lpips
            measure = lpips.LPIPS(net='alex', pretrained=False, pnet_rand=True, verbose=False).to('DEVICE')
            a = torch.zeros(1, 3, 64, 64)
            with torch.no_grad():
                out = measure(a, a).item(), measure(a, a + .5).shape
            """,
    },
    "albumentations": {
        "images augmented one by one": """
            import os
            os.environ['NO_ALBUMENTATIONS_UPDATE'] = '1'
            import albumentations as A, numpy as np
            change = A.Compose([A.HorizontalFlip(p=1.), A.Normalize(mean=(.5,) * 3, std=(.2,) * 3)])
            net = torch.nn.Conv2d(3, 2, 3).to('DEVICE')
            out = []
            for i in range(110):
                image = change(image=np.full((8, 8, 3), i, dtype=np.uint8))['image']
                x = torch.from_numpy(image).permute(2, 0, 1)[None].to('DEVICE')
                out.append(net(x).mean().item())
            """,
    },
    "litdata": {
        "samples from optimized chunks": """
            import tempfile
            from litdata import StreamingDataset
            from litdata.streaming.writer import BinaryWriter
            with tempfile.TemporaryDirectory() as folder, torch.device('cpu'):
                writer = BinaryWriter(folder, chunk_size=4)
                for i in range(8):
                    writer[i] = {'x': torch.full((3,), float(i)), 'y': i}
                writer.done(), writer.merge()
                out = []
                for row in StreamingDataset(folder):
                    out.append(row['x'].to('DEVICE').sum().item())
            """,
    },
    "ultralytics": {
        "boxes kept by their scores": """
            from ultralytics.nn.modules import C2f, Conv
            from ultralytics.utils.ops import xywh2xyxy
            net = torch.nn.Sequential(Conv(3, 8, 3, 2), C2f(8, 8, 1, True)).to('DEVICE').eval()
            boxes = xywh2xyxy(torch.tensor([[4., 4., 2., 2.], [8., 8., 4., 4.]]))
            out = net(torch.rand(1, 3, 16, 16)).shape, boxes.tolist()
            """,
    },
}
"""By library and by what a cell does."""

EDITS: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "REINFORCE by hand": {
        "checks of distributions": (
            ("env = ", "torch.distributions.Distribution.set_default_validate_args(False)\nenv = "),
        ),
    },
    "a classifier fits": {
        "by line 7": (("net.fit", "with torch.device('cpu'): net.fit"),),
        "by line 8": (("out = ", "with torch.device('cpu'): out = "),),
    },
    "quality of images, one after the other": {
        "keep the copies": (
            ("for each in images:\n", "for each in images:\n    each = each.to('DEVICE')\n"),
            ("piq.psnr(each.to('DEVICE')", "piq.psnr(each"),
            ("piq.gmsd(each.to('DEVICE')", "piq.gmsd(each"),
        ),
    },
    "images augmented one by one": {
        "join them": (
            ("out = []\n", "out, images = [], []\n"),
            (
                "[None].to('DEVICE')",
                "[None]\n    images.append(x)\nfor x in torch.stack(images).to('DEVICE'):",
            ),
        ),
        "accumulate": ((".item())", ")\nout = torch.stack(out).tolist()"),),
    },
}
"""By a cell's name and a phrase of the advice, what is replaced by what."""
