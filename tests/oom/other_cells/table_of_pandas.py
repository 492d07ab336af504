# A table of pandas is float64 and is standardized on the device.
# %%
import numpy as np, pandas as pd
df = pd.DataFrame(np.random.default_rng(0).normal(size=(40000, 100)))
# %%
T = torch.tensor(df.values).to("cuda")
Z = (T - T.mean(0)) / T.std(0)
cov = Z.T @ Z / len(Z)
